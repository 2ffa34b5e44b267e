"""The places in jax through which a recorded step is seen: where a compiled program is run, and where a gradient is
taken. They are opened for that step alone."""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from backtape import frameworks
from backtape.attach_jax.heads import Heads, Trace
from backtape.attach_jax.marks import marked, marking
from backtape.attach_jax.shadow import Shadow
from backtape.failopen import CAUGHT, Faults, describe
from backtape.taps_jax import lying_on, taping

NO_DOOR = (
    "this version of jax ({}) has no {}: loss heads are not found in it, and the job goes on; backtape.jax.tap and "
    "Tape.record are as they were"
)

# A shadow has the collectives of its program, and a process without one would let the others wait for it.
PROCESSES = (
    "the job has several processes, which would have to run the same programs to have the head heard in them: tap it "
    "by hand"
)

# Whether a shadow is made or run: its own programs have none.
_shadowing: ContextVar[bool] = ContextVar("shadowing", default=False)


def is_outside() -> bool:
    """Whether nothing is being traced."""
    core = frameworks.imported("jax._src.core")
    return bool(getattr(core, "trace_state_clean", lambda: True)())


@contextlib.contextmanager
def opened(step: Heads, shadows: dict[Any, Any], faults: Faults) -> Iterator[None]:
    """Has a shadow run before each program that the job runs, and gradients marked in it.

    shadows: by program, those that have run.
    """
    pjit, api = (frameworks.imported(f"jax._src.{name}") for name in ("pjit", "api"))
    wanted = [(pjit, "_infer_params"), (pjit, "_run_python_pjit"), (pjit, "_get_fastpath_data"), (api, "vjp")]
    missing = [name for holder, name in wanted if not hasattr(holder, name)]
    if missing or pjit is None or api is None:
        step.refuse(NO_DOOR.format(jax.__version__, ", ".join(missing)))
        yield
        return
    infer, run, vjp = pjit._infer_params, pjit._run_python_pjit, api.vjp
    asked: dict[int, Any] = {}  # what each function was called with, by its id

    @functools.wraps(infer)
    def inferred(*call: Any, **options: Any) -> Any:
        if len(call) == 4 and not options:
            asked[id(call[0])] = call
        return infer(*call, **options)

    @functools.wraps(run)
    def ran(*call: Any, **options: Any) -> Any:
        known = asked.pop(id(call[2]), None) if len(call) == 5 and is_outside() else None
        if known is not None and not _shadowing.get():
            with faults.guard("attach", "loss head", step.refuse):
                _shadowed(infer, known, step, shadows)
        return run(*call, **options)

    replacements = {
        (pjit, "_infer_params"): inferred,
        (pjit, "_run_python_pjit"): ran,
        # Without it a second recorded step would run its program unseen.
        (pjit, "_get_fastpath_data"): lambda *_, **__: None,
        (api, "vjp"): marked(vjp),
        (jax, "vjp"): marked(vjp),
    }
    kept = {(holder, name): getattr(holder, name) for holder, name in replacements}
    try:
        for (holder, name), replacement in replacements.items():
            setattr(holder, name, replacement)
        yield
    finally:
        for (holder, name), was in kept.items():
            setattr(holder, name, was)


def _shadowed(infer: Any, call: Any, step: Heads, shadows: dict[Any, Any]) -> None:
    """Runs the shadow of a call of a compiled program. Raises what goes wrong in it."""
    if jax.process_count() > 1:
        step.refuse(PROCESSES)
        return
    tokens = (_shadowing.set(True), lying_on.set(mesh_of(call[2:])))
    try:
        with taping(False), marking(True):
            params, flat = infer(*call)
        closed = params.params["jaxpr"]
        if closed not in shadows:
            shadows[closed] = Shadow(closed, Trace())
        shadow = shadows[closed]
        if shadow.is_wanted or shadow.trace.reasons:
            step.traces.append(shadow.trace)
        if not shadow.is_wanted:
            return
        with taping(False):
            shadow.run_on(*flat)
    except CAUGHT as error:
        step.refuse(f"the loss cannot be traced for its head: {describe(error)}")
    finally:
        _shadowing.reset(tokens[0])
        lying_on.reset(tokens[1])


def mesh_of(given: Any) -> Mesh | None:
    """The mesh of several devices that arrays lie on; None where there is none."""
    for leaf in jax.tree.leaves(given):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) and sharding.mesh.size > 1:
            return sharding.mesh
    return None
