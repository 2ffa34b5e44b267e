"""A fault as the job's code asks for it: whether it is there now, and whether of this parameter."""

SCOPES = ("all", "norms", "biases", "matrices", "embedding", "inner", "experts")


def names_in(scope, model, excluded=False):
    """The names of the parameters of a scope, tied ones once; all where a model has none of it."""
    named = dict(model.named_parameters())
    chosen = {
        "all": lambda name, one: True,
        "norms": lambda name, one: "norm" in name,
        "biases": lambda name, one: "bias" in name,
        "matrices": lambda name, one: one.ndim > 1,
        "embedding": lambda name, one: "embed" in name,
        "inner": lambda name, one: "blocks" in name or "experts" in name,
        "experts": lambda name, one: "experts" in name,
        "excluded": lambda name, one: one.ndim <= 1,
    }[scope]
    return {name for name, one in named.items() if chosen(name, one)} or set(named)


class Bug:
    """The fault of a job; in a fixed twin there is none. `active`: whether it acts in this step."""

    def __init__(self, job):
        self.job, self.name, self.scope, self.active = job, job.fault, job.scope, False
        self.concerned = None

    def names(self, model):
        """The parameters that it concerns."""
        self.concerned = names_in(self.scope, model)
        return self.concerned

    def there(self, name):
        return self.active and self.name == name

    def hits(self, fault, parameter=None):
        """Whether this fault acts now, on this parameter."""
        if not self.there(fault):
            return False
        return parameter is None or self.concerned is None or parameter in self.concerned
