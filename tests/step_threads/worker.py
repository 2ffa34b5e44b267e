"""One rank of several jobs, one after the other: what bench.py starts.

    python -m step_threads.worker RANK WORLD PORT PLAN DIRECTORY

PLAN is a file with the names of threads in JSON. Of each the dumps are DIRECTORY/NAME/dump and, of the
twin without the fault, DIRECTORY/NAME-fixed/dump. A file `done` says that all ranks ended.
"""

import datetime
import json
import os
import sys
import traceback
from pathlib import Path

# A rank that waits for one that has failed gives up after this.
PATIENCE = datetime.timedelta(seconds=60)


def in_torch(index, world, port, cases, directory):
    import torch
    import torch.distributed as dist

    from step_threads.jobs import job_of
    from step_threads.rank import Rank

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if world > 1:
        dist.init_process_group("gloo", rank=index, world_size=world, timeout=PATIENCE)
    for case, folder, fixed in dumps(cases, directory):
        try:
            job_of(case)(Rank(index, world, folder / "dump"), fixed)
            if world > 1:
                dist.barrier()
        except BaseException:
            failed(folder, index)
        if index == 0:
            (folder / "done").write_text("")
    if world > 1:
        dist.destroy_process_group()


def in_jax(cases, directory):
    from step_threads import muon
    from step_threads.threads import thread_of

    for case, folder, fixed in dumps(cases, directory):
        try:
            getattr(muon, case)(folder / "dump", thread_of(case).step, fixed)
        except BaseException:
            failed(folder, 0)
        (folder / "done").write_text("")


def dumps(cases, directory):
    """Each case with the fault and without, and the folder of its dump."""
    for case in cases:
        for fixed in (False, True):
            folder = directory / (f"{case}-fixed" if fixed else case)
            folder.mkdir(parents=True, exist_ok=True)
            yield case, folder, fixed


def failed(folder, index):
    """Writes down why a job ended, and ends all that would follow."""
    (folder / f"failed-{index}.txt").write_text(traceback.format_exc())
    os._exit(1)


def main(index, world, port, plan, directory):
    cases = json.loads(Path(plan).read_text())
    if cases["framework"] == "jax":
        os.environ["JAX_PLATFORMS"] = "cpu"
        in_jax(cases["cases"], directory)
    else:
        in_torch(index, world, port, cases["cases"], directory)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4], Path(sys.argv[5]))
