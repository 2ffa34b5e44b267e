"""Loss heads of public training codes, run from checkouts that are got from outside, and replayed."""
