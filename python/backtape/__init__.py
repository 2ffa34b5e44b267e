"""backtape records what the ranks of a training job held at a chosen step, and replays it.

    recorder = backtape.Recorder.from_env()          # inactive unless BACKTAPE_STEPS is set
    for step in range(steps):
        with recorder.step(step) as tape:
            ...
            tape.record("q", q, microbatch=0)
    recorder.close()

    report = backtape.replay("dumps/run-a", step=0, compare=["dq", "dk", "label_logits"])

Importing backtape imports no framework: it uses the one that the job has imported.
"""

from typing import TYPE_CHECKING, Any

from backtape._native import RecorderError, Summary, __version__
from backtape import frameworks, scalars
from backtape.postmortem import Report, Run, Step, checks, open, replay, trajectory
from backtape.recorder import Recorder
from backtape.tape import Tape

__all__ = [
    "Recorder",
    "RecorderError",
    "Report",
    "Run",
    "Step",
    "Summary",
    "Tape",
    "__version__",
    "checks",
    "open",
    "replay",
    "scalars",
    "trajectory",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Modules that import a framework are imported once somebody names them."""
        if name in ("jax", "torch", "transformers", "lightning"):
            return frameworks.load(f"backtape.{name}")
        raise AttributeError(f"module 'backtape' has no attribute {name!r}")
