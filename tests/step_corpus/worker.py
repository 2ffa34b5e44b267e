"""One rank of several jobs, one after the other: what bench.py starts.

    python -m step_corpus.worker RANK WORLD PORT PLAN DIRECTORY

PLAN is a file with a list of cases in JSON: the name, the job with the fault, and the fixed twin. Of
each the dumps are DIRECTORY/NAME and DIRECTORY/NAME-fixed; beside them each rank writes what the
fault changes, as effects-RANK.json.
"""

import datetime
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from step_corpus.job import Job
from step_corpus.trainer import run

# A rank that waits for one that has failed gives up after this.
PATIENCE = datetime.timedelta(seconds=60)


def effects(faulty, fixed):
    """How far each tensor is from that of the fixed twin, as a share of its size, in units of its
    rounding: by stage and parameter."""
    told = {}
    for key, right in fixed.items():
        wrong = faulty.get(key)
        if wrong is None or wrong.shape != right.shape:
            told[key] = float("inf")
            continue
        unit = torch.finfo(right.dtype).eps if right.is_floating_point() else 1.0
        difference = (wrong.double() - right.double()).norm()
        told[key] = float(difference / right.double().norm().clamp_min(1e-300) / unit)
    return told


def case(rank, name, faulty, fixed, directory):
    """Runs the twin and the job with the fault, and writes what differs."""
    folder = directory / name
    folder.mkdir(parents=True, exist_ok=True)
    right, _ = run(Job(**fixed), directory / f"{name}-fixed" / "dump")
    wrong, concerned = run(Job(**faulty), folder / "dump")
    told = {"effects": effects(wrong, right), "concerned": concerned}
    (folder / f"effects-{rank}.json").write_text(json.dumps(told, indent=1))


def main(rank, world, port, plan, directory):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=PATIENCE)
    for name, faulty, fixed in json.loads(Path(plan).read_text()):
        try:
            case(rank, name, faulty, fixed, directory)
            if world > 1:
                dist.barrier()
        except BaseException:
            (directory / name / f"failed-{rank}.txt").write_text(traceback.format_exc())
            os._exit(1)
        if rank == 0:
            (directory / name / "done").write_text("")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4], Path(sys.argv[5]))
