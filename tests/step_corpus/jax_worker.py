"""Several jobs in jax, one after the other in one process: what bench.py starts.

    python -m step_corpus.jax_worker RANK WORLD PORT PLAN DIRECTORY

PLAN and what is written are as worker.py has them; the first three are not needed.
"""

import json
import os
import sys
import traceback
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import numpy as np  # noqa: E402

from step_corpus.jax_job import Job  # noqa: E402
from step_corpus.jax_trainer import run  # noqa: E402


def effects(faulty, fixed):
    """How far each array is from that of the fixed twin, in units of its rounding."""
    told = {}
    for key, right in fixed.items():
        difference = np.linalg.norm(np.float64(faulty[key]) - np.float64(right))
        told[key] = float(
            difference / max(np.linalg.norm(np.float64(right)), 1e-300) / np.finfo(right.dtype).eps
        )
    return told


def main(plan, directory):
    for name, faulty, fixed in json.loads(Path(plan).read_text()):
        folder = directory / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            right, _ = run(Job(**fixed), directory / f"{name}-fixed" / "dump")
            wrong, concerned = run(Job(**faulty), folder / "dump")
        except BaseException:
            (folder / "failed-0.txt").write_text(traceback.format_exc())
            raise SystemExit(1) from None
        told = {"effects": effects(wrong, right), "concerned": concerned}
        (folder / "effects-0.json").write_text(json.dumps(told, indent=1))
        (folder / "done").write_text("")


if __name__ == "__main__":
    main(sys.argv[4], Path(sys.argv[5]))
