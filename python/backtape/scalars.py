"""Scalars of every step: what `recorder.scalars(step, loss=loss, ...)` does with its values, and
statistics of a model to pass to it.

A device may still compute a value when it is handed over. Nothing here waits for a device: a row is
kept until all its values are on the host, and then goes to the recorder's thread, in the order of
the calls.

    recorder.scalars(step, {**backtape.scalars.of_torch(model, optimizer)}, loss=loss,
                     grad_norm=norm, grad_norm_clipped=min(norm, 1.0), learning_rate=lr)

Names with a meaning (docs/trajectory.md): loss, learning_rate, grad_norm, grad_norm_clipped,
tokens (of this step, over the whole job), vocabulary; grad_norm/<layer>, param_norm/<layer>,
exp_avg_* and exp_avg_sq_*. This module imports no framework.
"""

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec

import numpy as np

from backtape.failopen import CAUGHT, describe, log
from backtape.frameworks import used

# Most rows that wait for a device, which holds their values. Where a job runs ahead of its device
# by more steps, the oldest row is dropped and counted.
MOST_PENDING = 1024


class Part:
    """One number of a vector on a device: a hundred norms are one transfer to the host."""

    __slots__ = ("_vector", "_index")

    def __init__(self, vector: "Pending", index: int) -> None:
        self._vector, self._index = vector, index

    def ready(self) -> bool:
        return self._vector.ready()

    def number(self) -> float:
        return self._vector.numbers()[self._index]

    __float__ = number


class Pending:
    """A jax array or torch tensor on its way to the host."""

    __slots__ = ("_array", "_event", "_numbers")

    def __init__(self, array: Any) -> None:
        self._event: Any = None
        self._numbers: list[float] | None = None
        if hasattr(array, "copy_to_host_async"):  # jax
            if not array.is_fully_addressable:
                # A replicated scalar of a job with several processes: every local copy is the same.
                array = array.addressable_shards[0].data
            array.copy_to_host_async()
        elif array.device.type == "cuda":
            array = array.detach().to("cpu", non_blocking=True)
            self._event = used("torch").cuda.Event()
            self._event.record()
        else:  # a torch tensor on the CPU, into which the job may go on writing: so a copy
            array = array.detach().to("cpu", copy=True)
        self._array = array

    def ready(self) -> bool:
        if self._numbers is not None:
            return True
        if self._event is not None:
            return self._event.query()
        is_ready = getattr(self._array, "is_ready", None)
        return is_ready is None or is_ready()

    def numbers(self) -> list[float]:
        """The values in their order; waits for them if they are not there yet."""
        if self._numbers is None:
            if self._event is not None:
                self._event.synchronize()
            array = self._array
            if hasattr(array, "copy_to_host_async"):
                host = np.asarray(array)
                # One number is the common case, and takes a fifth of the time so.
                one = host.size == 1
                flat = [float(host.item())] if one else host.astype(np.float64).ravel().tolist()
            else:
                flat = array.double().reshape(-1).tolist()
            # The device's memory is given back, and the vector was read for all of its parts.
            self._numbers, self._array, self._event = flat, None, None
        return self._numbers


def take(value: Any) -> float | Part:
    """The value as a number, or as a Part that will be one. Raises TypeError or ValueError for a value
    that is not one number."""
    if isinstance(value, (float, int)):
        return float(value)
    if isinstance(value, Part):
        return value
    if hasattr(value, "copy_to_host_async") or hasattr(value, "untyped_storage"):
        size = value.size if hasattr(value, "copy_to_host_async") else value.numel()
        if size != 1:
            raise TypeError(f"a scalar has one element, this has shape {tuple(value.shape)}")
        return Part(Pending(value), 0)
    return float(value)


class Rows:
    """Rows that wait for their values, and are then handed over."""

    def __init__(self, hand_over: Callable[[int, float, list[tuple[str, float]]], None]) -> None:
        self._hand_over = hand_over
        self._waiting: deque[tuple[int, float, list[tuple[str, float | Part]]]] = deque()
        self.dropped = 0

    def add(self, step: int, values: Iterator[tuple[str, Any]]) -> list[str]:
        """Takes a row. Returns a sentence for each value that is no number, which is left out."""
        row: list[tuple[str, float | Part]] = []
        refused = []
        for name, value in values:
            try:
                if value is not None:
                    row.append((str(name), take(value)))
            except Exception as error:
                refused.append(f"{name}: {error}")
        if row:
            self._waiting.append((int(step), time.time(), row))
        self.drain(wait=False)
        if len(self._waiting) > MOST_PENDING:
            self._waiting.popleft()
            self.dropped += 1
        return refused

    def drain(self, wait: bool) -> None:
        """Hands over rows, the first ones first: those whose values are there, or with `wait` all of
        them, which waits for the devices. Raises what reading a value raises; that row is lost."""
        while self._waiting:
            step, when, row = self._waiting[0]
            if not wait and not all(type(v) is float or v.ready() for _, v in row):
                return
            # Taken out before it is read: a value that raises must not stop the rows after it.
            self._waiting.popleft()
            numbers = [(name, v if type(v) is float else v.number()) for name, v in row]
            self._hand_over(step, when, numbers)

    def __len__(self) -> int:
        return len(self._waiting)


def parts(names: list[str], vector: Any) -> dict[str, Any]:
    """The numbers of a vector on a device as scalars by name, in one transfer to the host."""
    pending = Pending(vector)
    return {name: Part(pending, index) for index, name in enumerate(names)}


Arguments = ParamSpec("Arguments")

_TOLD: set[str] = set()


def fail_open(function: Callable[Arguments, dict[str, Any]]) -> Callable[Arguments, dict[str, Any]]:
    """Makes a function of statistics return {} and log one line where it raises. The job calls these
    functions itself, so no recorder keeps their exceptions from it."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **options: Arguments.kwargs) -> dict[str, Any]:
        try:
            return function(*args, **options)
        except CAUGHT as error:
            name = function.__name__
            if name not in _TOLD:
                _TOLD.add(name)
                message = "[backtape] scalars.%s failed and the job goes on: %s"
                log.log(logging.WARNING, message, name, describe(error))
            return {}

    return call


@fail_open
def of_torch(
    model: Any,
    optimizer: Any = None,
    *,
    layers: bool = True,
    total: str | None = None,
) -> dict[str, Any]:
    """Gradient and parameter norms of a torch model, and Adam's moments, as scalars by name.

    optimizer: an Adam, for the mean, largest magnitude and root mean square of exp_avg and
        exp_avg_sq over all parameters.
    layers: also the norms of each parameter, grad_norm/<parameter> and param_norm/<parameter>.
    total: the name for the norm of all gradients as they are at the time of the call ("grad_norm"
        before clipping, "grad_norm_clipped" after it).

    Norms are taken in f32. For DTensors and FSDP shards all of these are of this rank's part. Where
    they cannot be computed it returns {} and logs one line.
    """
    torch = used("torch")
    with torch.no_grad():
        named = [(name, local(p), local(p.grad)) for name, p in model.named_parameters()]
        names, numbers = [], []

        def add(name: str, number: Any) -> None:
            names.append(name)
            # A model may lie on several devices: the vector is made on the first number's.
            device = numbers[0].device if numbers else number.device
            numbers.append(number.to(device, torch.float32, non_blocking=True))

        # Squares of large norms overflow f16, so norms are taken in f32.
        norm = torch.linalg.vector_norm
        weights = [norm(p, dtype=torch.float32) for _, p, _ in named]
        graded = [(name, g) for name, _, g in named if g is not None]
        grads = [norm(g, dtype=torch.float32) for _, g in graded]
        if weights:
            add("param_norm", norm(torch.stack(weights)))
        if grads and total is not None:
            add(total, norm(torch.stack(grads)))
        if layers:
            for (name, *_), number in zip(named, weights):
                add(f"param_norm/{name}", number)
            for (name, _), number in zip(graded, grads):
                add(f"grad_norm/{name}", number)
        if optimizer is not None:
            states = list(optimizer.state.values())
            for moment in ("exp_avg", "exp_avg_sq"):
                held = [local(state[moment]).float() for state in states if moment in state]
                held = [m for m in held if m.numel() > 0]
                if held:
                    count = sum(m.numel() for m in held)
                    add(f"{moment}_mean", torch.stack([m.sum() for m in held]).sum() / count)
                    add(f"{moment}_max", torch.stack([m.abs().max() for m in held]).max())
                    squares = torch.stack([norm(m) for m in held])
                    add(f"{moment}_rms", norm(squares) / count**0.5)
        return parts(names, torch.stack(numbers)) if numbers else {}


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@fail_open
def of_jax(
    grads: Any = None,
    opt_state: Any = None,
    *,
    params: Any = None,
    mean: Any = None,
    square: Any = None,
    layers: bool = True,
    total: str | None = None,
) -> dict[str, Any]:
    """Gradient and parameter norms and Adam's moments of jax pytrees, as scalars by name, computed
    by one jitted function.

    grads, params: trees of gradients and parameters, for their norms.
    opt_state: a state in which namedtuples or dicts hold `mu` and `nu`, as optax has, for the
        moments; or give the trees of moments as `mean` and `square`.
    layers, total: as in `of_torch`.

    The sums go over whole arrays, so where several processes share arrays every process must call
    it. Inside a jitted function it returns one array for each scalar, to be returned from there.
    Where they cannot be computed it returns {} and logs one line.
    """
    jax = used("jax")
    if opt_state is not None:
        mean = find(opt_state, "mu") if mean is None else mean
        square = find(opt_state, "nu") if square is None else square
    trees = {"grad_norm": grads, "param_norm": params, "exp_avg": mean, "exp_avg_sq": square}
    # Parameters that optax masks out have no leaf with numbers.
    named = {kind: leaves(jax, tree) for kind, tree in trees.items() if tree is not None}
    names, compute = statistics(jax, named, layers, total)
    arrays = {kind: [leaf for _, leaf in held] for kind, held in named.items()}
    if not names:
        return {}
    if any(isinstance(leaf, jax.core.Tracer) for held in arrays.values() for leaf in held):
        return dict(zip(names, compute(arrays)))
    key = (tuple(names), layers, total)
    if key not in _JITTED:
        stack = jax.numpy.stack
        _JITTED[key] = jax.jit(lambda arrays: stack(compute(arrays)))
    return parts(names, _JITTED[key](arrays))


# The compiled functions, one for each set of names: a new function would be compiled at every step.
_JITTED: dict[Any, Callable[[Any], Any]] = {}


def leaves(jax: Any, tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree that hold floating-point numbers, each with its path, such as
    `layers.0.q`."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            found.append((jax.tree_util.keystr(path, simple=True, separator="."), leaf))
    return found


def statistics(
    jax: Any, named: dict[str, list[tuple[str, Any]]], layers: bool, total: str | None
) -> tuple[list[str], Callable[[dict[str, list[Any]]], list[Any]]]:
    """The names of the scalars, and the function that computes their values in the same order."""
    jnp = jax.numpy
    names: list[str] = []
    for kind, held in named.items():
        if not held:
            continue
        if kind.startswith("exp_avg"):
            names += [f"{kind}_{word}" for word in ("mean", "max", "rms")]
            continue
        whole = total if kind == "grad_norm" else kind
        names += [whole] if whole is not None else []
        names += [f"{kind}/{name}" for name, _ in held] if layers else []

    kinds = [kind for kind, held in named.items() if held]

    def compute(arrays: dict[str, list[Any]]) -> list[Any]:
        numbers: list[Any] = []
        # In the order of the names and not of `arrays`, as jit sorts the keys of a dict.
        for kind in kinds:
            held = [leaf.astype(jnp.float32) for leaf in arrays[kind]]
            if kind.startswith("exp_avg"):
                count = sum(leaf.size for leaf in held)
                numbers.append(sum(leaf.sum() for leaf in held) / count)
                numbers.append(jnp.stack([jnp.abs(leaf).max() for leaf in held]).max())
                numbers.append(jnp.sqrt(sum((leaf * leaf).sum() for leaf in held) / count))
                continue
            norms = [jnp.sqrt((leaf * leaf).sum()) for leaf in held]
            whole = total if kind == "grad_norm" else kind
            numbers += [jnp.sqrt(sum(norm * norm for norm in norms))] if whole is not None else []
            numbers += norms if layers else []
        return numbers

    return names, compute


def find(state: Any, name: str) -> Any:
    """The first attribute or key of this name in nested tuples, lists and mappings; None."""
    if isinstance(state, Mapping):
        if name in state:
            return state[name]
        inside = state.values()
    elif isinstance(state, (tuple, list)):
        held = getattr(state, name, None)
        # Only fields of a namedtuple count: every tuple also has methods, such as `index`.
        if name in getattr(state, "_fields", ()):
            return held
        inside = state
    elif hasattr(state, "__dataclass_fields__") and hasattr(state, name):
        return getattr(state, name)
    else:
        return None
    return next((held for held in (find(part, name) for part in inside) if held is not None), None)
