"""The name of a launch, from the launcher's variables: the same on all ranks of the launch, and
another one after a restart.

The coordinator lets ranks into one attempt only where they give the same name and were alive
together with its rank 0. So a name need not be unique (torchrun's run id is often "none"), but all
ranks must give the same: variables that differ between the ranks of a launch are left out.
docs/launch.md.
"""

import re
from collections.abc import Mapping

# Longest name that is made here. A longer one is cut, in the same way on all ranks.
LONGEST = 120


def launch_name(environment: Mapping[str, str], world_size: int) -> str | None:
    """The name that the launcher's variables give, as NAME or NAME/RESTART; None where no launcher is
    known."""
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
    # Each agent counts the restarts that it asked for itself, so the count differs between nodes.
    alone = environment.get("GROUP_WORLD_SIZE") == "1"
    restart = environment.get("TORCHELASTIC_RESTART_COUNT") if alone else None
    return f"torchrun-{run}" + (f"-{restart}" if restart else "")


def _mpi(environment: Mapping[str, str], world_size: int) -> str | None:
    # Only where one mpirun has started all ranks: several would have a name each.
    whole = environment.get("OMPI_COMM_WORLD_SIZE") == str(world_size)
    space = environment.get("PMIX_NAMESPACE")
    return f"mpi-{space}" if whole and space else None


def _slurm(environment: Mapping[str, str], world_size: int) -> tuple[str, int] | None:
    # Each part of a heterogeneous job has a job number of its own, and knows that of the first
    # part.
    job = environment.get("SLURM_JOB_ID_HET_GROUP_0") or environment.get("SLURM_JOB_ID")
    if not job:
        return None
    restart = environment.get("SLURM_RESTART_COUNT") or "0"
    # Slurm's job step is the launch only where it has all ranks: one srun for each node is usual
    # too.
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
    ranks_of_a_task = _number(environment, "LOCAL_WORLD_SIZE") or 1
    whole = tasks and world_size in (tasks, tasks * ranks_of_a_task)
    step = environment.get("SLURM_STEP_ID") if whole else None
    return f"slurm-{job}" + (f".{step}" if step else ""), int(restart)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else None


def _plain(name: str) -> str:
    """The name, with each character that the name of a launch may not have replaced by a dash."""
    return re.sub(r"[^A-Za-z0-9._+=@:\[\],-]", "-", name)[:LONGEST]
