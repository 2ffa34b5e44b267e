"""What a launcher calls a launch: the same on all its ranks, another after a restart.

The coordinator lets ranks meet only where they call their launch the same and were alive together
with its rank 0. So a name need not be unique (torchrun's run id is often "none"), but all ranks
must give the same one: what differs between the ranks of one launch is left out. docs/launch.md.
"""

import re
from collections.abc import Mapping

# Longest name that is made here; what is longer is cut, on all ranks alike.
LONGEST = 120


def launch_name(environment: Mapping[str, str], world_size: int) -> str | None:
    """The name that the launcher's variables give, as NAME or NAME/RESTART."""
    parts = [part(environment, world_size) for part in (_torchrun, _mpi)]
    name = "+".join(part for part in parts if part)
    slurm = _slurm(environment, world_size)
    if slurm is None:
        return _plain(name) or None
    job, restart = slurm
    return f"{_plain('+'.join(filter(None, (job, name))))}/{restart}"


def _torchrun(environment: Mapping[str, str], world_size: int) -> str | None:
    run = environment.get("TORCHELASTIC_RUN_ID")
    if not run:
        return None
    # Each agent counts the restarts that it asked for itself, so nodes disagree on the count.
    alone = environment.get("GROUP_WORLD_SIZE") == "1"
    restart = environment.get("TORCHELASTIC_RESTART_COUNT") if alone else None
    return f"torchrun-{run}" + (f"-{restart}" if restart else "")


def _mpi(environment: Mapping[str, str], world_size: int) -> str | None:
    # Of one mpirun for all ranks; several of them would have a name each.
    whole = environment.get("OMPI_COMM_WORLD_SIZE") == str(world_size)
    space = environment.get("PMIX_NAMESPACE")
    return f"mpi-{space}" if whole and space else None


def _slurm(environment: Mapping[str, str], world_size: int) -> tuple[str, int] | None:
    # The parts of a heterogeneous job have numbers of their own, and know that of the first.
    job = environment.get("SLURM_JOB_ID_HET_GROUP_0") or environment.get("SLURM_JOB_ID")
    if not job:
        return None
    restart = environment.get("SLURM_RESTART_COUNT") or "0"
    # A step is the launch only where it holds all ranks: one srun for each node is usual too.
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
    ranks_of_a_task = _number(environment, "LOCAL_WORLD_SIZE") or 1
    whole = tasks and world_size in (tasks, tasks * ranks_of_a_task)
    step = environment.get("SLURM_STEP_ID") if whole else None
    return f"slurm-{job}" + (f".{step}" if step else ""), int(restart)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else None


def _plain(name: str) -> str:
    """The name with what no name of a run or launch may hold replaced."""
    return re.sub(r"[^A-Za-z0-9._+=@:\[\],-]", "-", name)[:LONGEST]
