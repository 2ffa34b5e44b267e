"""What all jobs draw by."""


def chance(draw, probability):
    """Whether something that happens so often does."""
    return bool(draw.random() < probability)


def pick(draw, values):
    """One of several values, as it stands there."""
    return values[int(draw.integers(len(values)))]
