"""The losses that are found when a job calls them, whatever name it imported them by.

Each entry of `LOSSES` is a function of torch or of another library, and how one of its calls is read. A
library that the job has not imported is not looked for.
"""

import inspect
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from backtape import frameworks
from backtape.attach_torch.graph import Unfollowed, kind_of
from backtape.step_torch.patches import Patches


@dataclass
class Call:
    """One call of a loss, as the job made it."""

    function: str  # as the user knows it
    labels: torch.Tensor
    result: torch.Tensor
    logits: torch.Tensor | None = None
    classes: int = -1  # the dimension of the logits that is the vocabulary
    are_logs: bool = False  # they are log-probabilities
    # The result is the log-probability of each label, of which the loss is the negative.
    is_likelihood: bool = False
    problem: str | None = None  # why no head can be declared of it
    q: torch.Tensor | None = None  # a fused loss takes q and k in place of logits
    k: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    class_weights: torch.Tensor | None = None
    reduction: str = "mean"
    ignore_label: int | None = -100
    # What else it says of the head, as options of `Tape.head`.
    head: dict[str, Any] = field(default_factory=dict)
    is_known: bool = True  # no option but these has a part in it


Seen = Callable[[Call], None]
Reader = Callable[[str, dict[str, Any], Any], Call]


@dataclass
class Loss:
    """A function that computes a loss."""

    name: str  # as the user knows it
    module: str  # the module that the job's call goes through
    attribute: str
    read: Reader
    parameters: str = ""  # of a builtin function, which has no signature
    # Whether a call is one itself; otherwise it calls another loss that is.
    applies: Callable[[dict[str, Any]], bool] = lambda given: True
    is_named: bool = False  # the user has named it


@dataclass
class Watched:
    """What is watched already."""

    paths: set[str] = field(default_factory=set)  # of the losses
    inside: list[str] = field(default_factory=list)  # the losses that are being computed


def watch(
    patches: Patches, seen: Seen, named: Mapping[str, Mapping[str, str]], watched: Watched
) -> None:
    """Has `seen` called with every call of a known loss whose result takes a gradient. Called again, it adds
    those of libraries that were imported since.

    named: losses of the job's own, as "package.module:function", with the names of its arguments q, k,
        labels, bias and logits.
    """
    for loss in (*LOSSES, *losses_of(named)):
        *path, attribute = loss.attribute.split(".")
        owner: Any = frameworks.imported(loss.module)
        for name in path:
            owner = getattr(owner, name, None)
        function = getattr(owner, attribute, None)
        # A class that stands for a function would be none any more.
        whole = f"{loss.module}.{loss.attribute}"
        if function is None or isinstance(function, type) or whole in watched.paths:
            continue
        watched.paths.add(whole)
        observer = _observer(loss, function, seen, watched.inside)
        patches.attribute(owner, attribute, observer)
        _known_to_script(patches, function, getattr(owner, attribute))
        for holder, name in _imported_by(function) if loss.is_named else ():
            patches.attribute(holder, name, observer)


def _known_to_script(patches: Patches, function: Any, replacement: Any) -> None:
    """torch.jit.script knows torch's own functions by their identity, and is to know what stands for one."""
    builtins = frameworks.imported("torch.jit._builtins")
    name = builtins._find_builtin(function) if builtins is not None else None
    if name is not None:
        builtins._register_builtin(replacement, name)
        # The replacement's identity is that of another object once it is gone.
        table = builtins._get_builtin_table()
        patches.afterwards(lambda: table.pop(id(replacement), None))


def _observer(
    loss: Loss, function: Any, seen: Seen, inside: list[str]
) -> Callable[..., Generator[None, Any, None]]:
    """Looks at the calls of one loss. inside: the losses that are being computed, so that one which is
    called by another is not taken for a loss of its own."""
    bound = _binder(loss, function)

    def observe(*args: Any, **options: Any) -> Generator[None, Any, None]:
        given = {} if inside else bound(args, options)
        if inside or not loss.applies(given):
            return
        inside.append(loss.name)
        try:
            result = yield
        finally:
            inside.pop()
        first = result[0] if isinstance(result, tuple) else result
        if isinstance(first, torch.Tensor) and first.requires_grad:
            try:
                call = loss.read(loss.name, given, first)
            except Unfollowed as error:
                call = Call(loss.name, first, first, problem=str(error))
            seen(call)

    return observe


def _binder(loss: Loss, function: Any) -> Callable[[Any, Any], dict[str, Any]]:
    """Gives the arguments of a call by their names."""
    if loss.parameters:
        names = loss.parameters.split()
        return lambda args, options: dict(zip(names, args)) | options
    signature = inspect.signature(function)

    def bound(args: Any, options: Any) -> dict[str, Any]:
        arguments = signature.bind(*args, **options)
        arguments.apply_defaults()
        return dict(arguments.arguments)

    return bound


def _named(path: str, names: Mapping[str, str]) -> Loss:
    """A loss that the user names. Raises ValueError where the name or the arguments cannot be used."""
    module, _, attribute = path.partition(":")
    known = {"q", "k", "labels", "bias", "logits"}
    is_whole = "labels" in names and ({"q", "k"} <= names.keys() or "logits" in names)
    if not attribute or not is_whole or not names.keys() <= known:
        raise ValueError(
            f"losses= has {path!r}: {dict(names)}: the name is package.module:function, and its arguments "
            "are named as labels and either logits or q and k; bias may be added"
        )

    def read(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
        unknown = set(names.values()) - given.keys()
        if unknown:
            raise Unfollowed(f"it has no argument {', '.join(unknown)}: it has {', '.join(given)}")
        taken = {name: given[argument] for name, argument in names.items()}
        said = _options(given, set(names.values()))
        return Call(function, result=result, is_known=False, **taken, **said)

    return Loss(path, module, attribute, read, is_named=True)


def losses_of(named: Mapping[str, Mapping[str, str]]) -> list[Loss]:
    """The losses that a user has named. Raises ValueError where they cannot be."""
    return [_named(path, names) for path, names in named.items()]


def _imported_by(function: Any) -> list[tuple[Any, str]]:
    """The modules that have imported a function by its name, each with the name."""
    return [
        (module, name)
        for module in list(frameworks.all_imported())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is function
    ]


def _options(given: Mapping[str, Any], taken: set[str]) -> dict[str, Any]:
    """What a call says by arguments of the usual names, without those that are something else."""
    options: dict[str, Any] = {}
    for name, usual in USUAL.items():
        words = [word for word in usual if word not in taken]
        value = next((given[word] for word in words if given.get(word) is not None), None)
        if value is not None:
            options[name] = value
    own = {name: options.pop(name) for name in OF_CALL if name in options}
    return own | {"head": options}


# Names that loss functions have for the same thing.
USUAL = {
    "reduction": ("reduction",),
    "ignore_label": ("ignore_index", "ignored_index"),
    "label_smoothing": ("label_smoothing",),
    "softcap": ("softcap", "logit_softcapping", "logits_soft_cap"),
    "logit_scale": ("logit_scale", "scale"),
    "z_loss": ("z_loss", "lse_square_scale"),
    "class_weights": ("weight", "ce_weight"),
}

# Those that a call has by itself; the others are options of the head.
OF_CALL = ("reduction", "ignore_label", "class_weights")

REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def _cross_entropy(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    logits, labels = given["self"], given["target"]
    if labels.is_floating_point():
        raise Unfollowed("its targets are probabilities and not labels")
    _refuse_both(given)
    return Call(
        function,
        labels,
        result,
        logits=logits,
        classes=0 if logits.dim() == 1 else 1,
        class_weights=given.get("weight"),
        reduction=REDUCTIONS[given.get("reduction", 1)],
        ignore_label=given.get("ignore_index", -100),
        head={"label_smoothing": given.get("label_smoothing", 0.0)},
    )


def _refuse_both(given: Mapping[str, Any]) -> None:
    """torch smooths with the weight of each class, which no option of a head describes."""
    if given.get("weight") is not None and given.get("label_smoothing"):
        raise Unfollowed("it has class weights and label smoothing at once")


def _nll(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    """`nll_loss(log_softmax(logits))`: the graph has the logits."""
    call = _cross_entropy(function, given, result)
    call.are_logs = True
    return call


def _gathered(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    """`log_softmax(logits).gather(-1, labels)`: what becomes of the log-probability of each label shows the
    gradient that arrives at it."""
    logs, labels = given["input"], given["index"]
    return Call(
        function,
        labels,
        result,
        logits=logs,
        classes=given["dim"],
        are_logs=True,
        is_likelihood=True,
        reduction="none",
        ignore_label=None,
    )


def _is_of_labels(given: dict[str, Any]) -> bool:
    """Whether a gather takes one log-probability of each row."""
    logs, labels, dim = (given.get(name) for name in ("input", "index", "dim"))
    if not isinstance(logs, torch.Tensor) or not isinstance(labels, torch.Tensor) or logs.grad_fn is None:
        return False
    last = logs.dim() - 1
    rows = logs.shape[:-1] == labels.shape[:-1] and labels.shape[-1:] == (1,)
    return rows and dim in (-1, last) and kind_of(logs.grad_fn) == "LogSoftmax"


def _linear_cross_entropy(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    if given["target"].is_floating_point():
        raise Unfollowed("its targets are probabilities and not labels")
    _refuse_both(given)
    return Call(
        function,
        given["target"],
        result,
        q=given["input"],
        k=given["linear_weight"],
        bias=given.get("linear_bias"),
        class_weights=given.get("weight"),
        reduction=given["reduction"],
        # torch reads None as the number that it has for cross_entropy.
        ignore_label=-100 if given["ignore_index"] is None else given["ignore_index"],
        head={"label_smoothing": given["label_smoothing"]},
    )


def _trl(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    """trl's log-probabilities by chunks: softcap after the scale, and the temperature after both."""
    temperature, softcap = given["temperature"], given.get("softcap")
    return Call(
        function,
        given["labels"],
        result,
        q=given["q"],
        k=given["k"],
        bias=given["bias"],
        is_likelihood=True,
        reduction="none",
        ignore_label=None,
        head={
            "softcap": None if softcap is None else softcap / temperature,
            "logit_scale": given.get("scale", 1.0) / temperature,
        },
    )


# `cross_entropy`, `nn.CrossEntropyLoss` and all that calls them go through one function of torch._C.
CROSS_ENTROPY = "self target weight reduction ignore_index label_smoothing"
LOSSES = [
    Loss("cross_entropy", "torch._C._nn", "cross_entropy_loss", _cross_entropy, CROSS_ENTROPY),
    Loss("nll_loss", "torch._C._nn", "nll_loss_nd", _nll, "self target weight reduction ignore_index"),
    Loss("gather", "torch", "gather", _gathered, "input dim index", _is_of_labels),
    Loss("gather", "torch", "Tensor.gather", _gathered, "input dim index", _is_of_labels),
    Loss(
        "ChunkedLogProbFunction of trl",
        "trl.kernels.chunked_logprob",
        "ChunkedLogProbFunction.apply",
        _trl,
        "q k bias labels temperature chunk softcap scale outputs",
    ),
    Loss(
        "linear_cross_entropy",
        "torch.nn.functional",
        "linear_cross_entropy",
        _linear_cross_entropy,
        applies=lambda given: given.get("options") is not None,
    ),
]
