"""Training jobs in torch with a fault planted in what happens to a gradient after it was computed."""
