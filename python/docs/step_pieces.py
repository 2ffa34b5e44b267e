"""The pieces of the job in step_job.py, as source text, and what a faulty one is (step_plants.py)."""

from dataclasses import dataclass, field
from typing import Any

PIECES = {
    "start": """\
if step == 0:
    with torch.no_grad():
        model.head.weight /= model.head.weight.norm()
""",
    "clear": "optimizer.zero_grad()\n",
    "begin": "",  # as clear, once the recording of the step has begun
    "backward": """\
for batch in batches:
    loss = model(*batch) / len(batches)
    (scaler.scale(loss) if scaler else loss).backward()
""",
    "reduce": """\
for name, p in model.named_parameters():
    dist.all_reduce(p.grad)
    p.grad /= world
""",
    "unscaled": "if scaler:\n    scaler.unscale_(optimizer)\n",
    "unscale": """\
for p in model.parameters():
    p.grad *= 1 / scale
""",
    "clip": "torch.nn.utils.clip_grad_norm_(model.parameters(), limit)\n",
    "load": "",  # of the optimizer's state, at the start of its step
    "count": 'state["step"] += 1\n',
    "step": "scaler.step(optimizer) if scaler else optimizer.step()\n",
    "take": "optimizer.step()\n",  # what the scaler does
    "rule": "",
}

# Other pieces that jobs have, in place of those above.
BACKWARD = """\
for batch in batches:
    loss = model(*batch) / len(batches)
    loss.backward()
"""
COUNTED = """\
count = 0
for tokens, labels in batches:
    model(tokens, labels).backward()
    count += int((labels != -100).sum())
for p in model.parameters():
    p.grad /= count
"""
BUFFER = """\
main_grad = {p: torch.zeros_like(p) for p in model.parameters()}
for batch in batches:
    (model(*batch) / len(batches)).backward()
    for p in model.parameters():
        main_grad[p] += p.grad
        p.grad = None
for p in model.parameters():
    p.grad = main_grad[p]
"""
EAGER = """\
shard = {p: torch.zeros_like(p) for p in model.parameters()}
for batch in batches:
    (model(*batch) / len(batches)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        shard[p] += p.grad / world
        p.grad = None
for p in model.parameters():
    p.grad = shard[p]
"""
BUCKET = """\
for name, p in model.named_parameters():
    dist.all_reduce(p.grad)
    bucket[p].copy_(p.grad / world)
    p.grad.copy_(bucket[p])
"""
BUCKET_LATE = """\
    mean = p.grad / world
    p.grad.copy_(bucket[p])
    bucket[p].copy_(mean)
"""
UNSCALE = "scaler.unscale_(optimizer)\n"
SWAP = """\
for p, q in zip(model.layers[0].parameters(), model.layers[1].parameters()):
    optimizer.state[p], optimizer.state[q] = optimizer.state[q], optimizer.state[p]
"""
REPLACED = """\
if step == 0:
    model.head = copy.deepcopy(model.head)
    optimizer.param_groups[0]["params"] = list(model.parameters())
"""
SUMMED = """\
for name, p in model.named_parameters():
    dist.all_reduce(p.grad)
"""
BY_AXIS = """\
for name, p in model.named_parameters():
    axes = ["data"] if name == "experts" else ["data", "expert"]
    for axis in axes:
        dist.all_reduce(local(p.grad), group=mesh[axis].get_group())
        p.grad /= mesh[axis].size()
"""
CLIP = """\
norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
algebra.norm(norm, max_norm=limit, epsilon=1e-6)
for p in model.parameters():
    p.grad.mul_(limit / (norm + 1e-6))
algebra.clipped()
"""
CLIP_SHARDS = """\
grads = [p.grad.to_local() for p in model.parameters()]
squared = torch.stack([g.square().sum() for g in grads]).sum()
dist.all_reduce(squared, group=mesh["shard"].get_group())
norm = squared.sqrt()
algebra.norm(norm, max_norm=limit, epsilon=1e-6)
for g in grads:
    g.mul_(limit / (norm + 1e-6))
algebra.clipped()
"""

RULES = {
    "SGD": """\
buffer.mul_(momentum).add_(g)
w.add_(buffer, alpha=-lr)
""",
    "AdamW": """\
w.mul_(1 - lr * decay)
m.lerp_(g, 1 - beta1)
v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
denominator = (v / (1 - beta2**t)).sqrt() + eps
w.addcdiv_(m, denominator, value=-lr / (1 - beta1**t))
""",
    "NAdam": """\
mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (s * 0.004)) for s in (t, t + 1))
product *= mu
m.lerp_(g, 1 - beta1)
v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
denominator = (v / (1 - beta2**t)).sqrt() + eps
w.addcdiv_(g, denominator, value=-lr * (1 - mu) / (1 - float(product)))
w.addcdiv_(m, denominator, value=-lr * mu_next / (1 - float(product) * mu_next))
""",
    "RAdam": """\
m.lerp_(g, 1 - beta1)
v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
longest = 2 / (1 - beta2) - 1
length = longest - 2 * t * beta2**t / (1 - beta2**t)
update = m / (1 - beta1**t)
if length > 5:
    rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    update *= rectified**0.5 * (1 - beta2**t) ** 0.5 / (v.sqrt() + eps)
w.add_(update, alpha=-lr)
""",
    "Adamax": """\
m.lerp_(g, 1 - beta1)
largest.copy_(torch.maximum(beta2 * largest, g.abs() + eps))
w.addcdiv_(m, largest, value=-lr / (1 - beta1**t))
""",
    "RMSprop": """\
square_avg.mul_(alpha).addcmul_(g, g, value=1 - alpha)
buffer.mul_(momentum).addcdiv_(g, square_avg.sqrt() + eps)
w.add_(buffer, alpha=-lr)
""",
    "Lamb": """\
m.lerp_(g, 1 - beta1)
v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
update = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps) + decay * w
squares = torch.stack([w.square().sum(), update.square().sum()])
dist.all_reduce(squares, group=mesh["shard"].get_group())
ratio = float(squares[0] / squares[1]) ** 0.5 if squares.all() else 1.0
w.add_(update, alpha=-lr * ratio)
""",
    "Muon": """\
buffer.lerp_(g, 1 - momentum)
update = g.lerp(buffer, momentum)
update = orthogonal(update, (3.4445, -4.775, 2.0315), 5, 1e-7)
w.mul_(1 - lr * decay)
w.add_(update, alpha=-lr * max(1, w.shape[0] / w.shape[1]) ** 0.5)
""",
    "Lion": """\
w.mul_(1 - lr * decay)
update = beta1 * m + (1 - beta1) * g
w.add_(update.sign(), alpha=-lr)
m.lerp_(g, 1 - beta2)
""",
}
CENTERED = """\
square_avg.mul_(alpha).addcmul_(g, g, value=1 - alpha)
grad_avg.lerp_(g, 1 - alpha)
spread = square_avg - grad_avg.square()
w.addcdiv_(g, spread.sqrt() + eps, value=-lr)
"""
MASTERS = """\
w.addcdiv_(m, denominator, value=-lr / (1 - beta1**t))
p.copy_(w)
"""

# The tensors of the state of each rule, by the names that torch gives them.
STATES = {
    "SGD": {"momentum_buffer": "buffer"},
    "AdamW": {"exp_avg": "m", "exp_avg_sq": "v"},
    "NAdam": {"exp_avg": "m", "exp_avg_sq": "v", "mu_product": "product"},
    "RAdam": {"exp_avg": "m", "exp_avg_sq": "v"},
    "Adamax": {"exp_avg": "m", "exp_inf": "largest"},
    "RMSprop": {"square_avg": "square_avg", "momentum_buffer": "buffer"},
    "Lamb": {"exp_avg": "m", "exp_avg_sq": "v"},
    "Lion": {"exp_avg": "m"},
    "Muon": {"momentum_buffer": "buffer"},
}
ADAM = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
HYPER = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": ADAM | {"weight_decay": 0.1},
    "NAdam": ADAM | {"momentum_decay": 0.004},
    "RAdam": ADAM | {"betas": (0.9, 0.999)},
    "Adamax": ADAM,
    "RMSprop": {"lr": 1e-2, "alpha": 0.9, "eps": 1e-8, "momentum": 0.9},
    "Lamb": ADAM | {"eps": 1e-6, "weight_decay": 0.1},
    "Lion": ADAM | {"lr": 1e-3, "weight_decay": 0.1},
    "Muon": {"lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.1},
}


@dataclass(frozen=True)
class Plant:
    """A cause, as a job has it.

    about: how it comes about, in Markdown.  threads: where it was seen.
    piece: which piece of the job it is in.  wrong, right: the sources of that piece.
    """

    cause: str
    about: str
    piece: str
    wrong: str
    right: str
    threads: str = ""
    ranks: int = 1
    microbatches: int = 1
    step: int = 2  # the recorded one
    mesh: dict[str, int] = field(default_factory=dict)
    reduced_over: dict[str, str] = field(default_factory=dict)
    sharded: bool = False
    experts: bool = False
    always: bool = False  # the fault is in all steps, not in the recorded one alone
    scaled: bool = False
    master: bool = False
    excludes: bool = False
    matrices: bool = False  # the optimizer holds no others
    # Losses are sums over tokens, of which some do not count, and the head is recorded.
    counted: bool = False
    rule: str = ""
    hyper: dict[str, Any] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    pieces: dict[str, str] = field(default_factory=dict)


PLANTS: dict[str, Plant] = {}


def indented(source):
    """The lines of a source, deeper by one level."""
    return "".join(f"    {line}" for line in source.splitlines(True))


def plant(cause, about, piece, right, *changes, **job):
    """Registers a plant: `changes` are pairs of right and wrong lines."""
    wrong = right
    for good, bad in changes:
        if not right:
            wrong = bad
            continue
        if wrong.count(good) != 1:
            raise ValueError(f"{cause}: {good!r} is {wrong.count(good)} times in the right lines")
        wrong = wrong.replace(good, bad)
    if "rule" in job:
        job.setdefault("states", STATES[job["rule"]])
    PLANTS[cause] = Plant(cause, about, piece, wrong, right, **job)


def of_rule(cause, about, rule, *changes, right=None, **job):
    """The same of a job whose optimizer is its own."""
    plant(cause, about, "rule", right or RULES[rule], *changes, rule=rule, **job)
