"""What a recorder is told, and where the environment says it.

Variables: BACKTAPE_STEPS (unset: record nothing, unless it is to wait), BACKTAPE_DIR, BACKTAPE_RUN,
BACKTAPE_COORDINATOR, BACKTAPE_CREDENTIALS, BACKTAPE_STRICT, BACKTAPE_ATTEMPT, BACKTAPE_LAUNCH,
BACKTAPE_TRANSPORT, BACKTAPE_PLACE_PROOF, BACKTAPE_SCALARS (1: scalars also where no steps are
recorded), BACKTAPE_CLOSE_PATIENCE_S; BACKTAPE_RANK and BACKTAPE_WORLD_SIZE, else the launcher's
own.
What of a step: BACKTAPE_TENSORS, BACKTAPE_RANKS, BACKTAPE_MICROBATCHES, BACKTAPE_MAX_TENSOR_BYTES,
BACKTAPE_MAX_STEP_BYTES. To wait for plans and triggers: BACKTAPE_WATCH, BACKTAPE_RING,
BACKTAPE_RING_BYTES, BACKTAPE_TRIGGER_GRAD_NORM, BACKTAPE_TRIGGER_SPREAD. docs/selection.md.
Of each GPU, read by backtape/gpu.py: BACKTAPE_GPU_PINNED, BACKTAPE_GPU_SNAPSHOTS. docs/device.md.
"""

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Variables that launchers set for a process: its rank and the number of ranks. In this order, as
# torchrun may run inside srun. Both of a pair, or neither: half of one launcher and half of
# another is no rank. SLURM_NTASKS is not asked: a batch script has it too, being one process.
LAUNCHERS = (
    ("BACKTAPE_RANK", "BACKTAPE_WORLD_SIZE"),
    ("RANK", "WORLD_SIZE"),
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)

# Software whose versions go into run.json, if the job has imported it.
FRAMEWORKS = ("numpy", "ml_dtypes", "jax", "jaxlib", "torch")

# Parts of the selection that are read from their text.
SPELLED = ("tensors", "ranks", "microbatches", "max_tensor_bytes", "max_step_bytes", "ring_bytes")

# Numbers that the environment may give.
NUMBERS = (
    ("attempt", int), ("ring", int), ("trigger_grad_norm", float), ("trigger_spread", float),
    ("close_patience_s", float),
)  # fmt: skip

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass
class Settings:
    """Settings of one recorder, as `backtape._native.Recorder` reads them.

    `None` leaves a default to the recorder. Seconds and bytes are in the names.
    """

    directory: str | os.PathLike[str]
    steps: str
    rank: int
    world_size: int
    run: str | None = None
    coordinator: str | None = None
    attempt: int | None = None
    host: str | None = None
    mesh: list[tuple[str, int]] = field(default_factory=list)
    coordinates: dict[str, int] = field(default_factory=dict)
    transport: str = "auto"
    strict: bool = False
    queue_bytes: int | None = None
    call_cap_s: float | None = None
    join_deadline_s: float | None = None
    step_deadline_s: float | None = None
    close_patience_s: float | None = None
    tensors: str | None = None
    ranks: str | None = None
    microbatches: str | None = None
    max_tensor_bytes: str | int | None = None
    max_step_bytes: str | int | None = None
    watch: bool = False
    ring: int = 0
    ring_bytes: str | int | None = None
    heartbeat_s: float | None = None
    trigger_grad_norm: float | None = None
    trigger_spread: float | None = None
    max_triggers: int | None = None
    trigger_cooldown_s: float | None = None
    credentials: str | os.PathLike[str] | None = None
    launch: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Written 3 or 512 as readily as "3" or "512MiB".
        for name in SPELLED:
            value = getattr(self, name)
            setattr(self, name, None if value is None else str(value))


def truth(name: str, word: str) -> bool:
    """The truth value of an environment variable; ValueError for any other word."""
    if word.lower() in TRUE:
        return True
    if word.lower() in FALSE:
        return False
    raise ValueError(f"{name}={word!r}: write 1 or 0")


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments of `Recorder` that the environment gives."""
    options: dict[str, Any] = {}
    words = ("dir", "steps", "run", "coordinator", "credentials", "transport", "launch")
    for name in (*words, *SPELLED):
        if environment.get(variable(name)):
            options[name] = environment[variable(name)]
    for name, number in NUMBERS:
        if environment.get(variable(name)):
            options[name] = number(environment[variable(name)])
    for name in ("strict", "place_proof", "watch", "scalars"):
        if variable(name) in environment:
            options[name] = truth(variable(name), environment[variable(name)])
    return options


def variable(option: str) -> str:
    """The environment variable of a keyword argument."""
    return "BACKTAPE_" + option.upper()


def waits(options: Mapping[str, Any]) -> bool:
    """True when a recorder of these options is to wait for plans and triggers."""
    return bool(options.get("watch") or options.get("ring"))


def rank_and_world_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """This process's index in the job and the number of processes.

    backtape's own variables win, then a framework that was told (`jax.distributed.initialize`,
    `torch.distributed.init_process_group`), then the launcher's variables; a process that nobody
    launched is rank 0 of 1.
    """
    own, *launchers = LAUNCHERS
    found = _pair(environment, own) or _jax_process() or _torch_process()
    return found or next(filter(None, (_pair(environment, pair) for pair in launchers)), (0, 1))


def _pair(environment: Mapping[str, str], names: tuple[str, str]) -> tuple[int, int] | None:
    values = [environment.get(name, "").strip() for name in names]
    return (int(values[0]), int(values[1])) if all(values) else None


def _jax_process() -> tuple[int, int] | None:
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return None
    return jax.process_index(), jax.process_count()


def _torch_process() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def mesh_axes(mesh: Any) -> list[tuple[str, int]]:
    """Axis names and sizes, outermost first, of a dict of sizes, a jax mesh or a torch
    DeviceMesh."""
    if mesh is None:
        return []
    if hasattr(mesh, "get_coordinate"):
        names = mesh.mesh_dim_names or [f"axis{i}" for i in range(mesh.ndim)]
        return [(str(name), int(size)) for name, size in zip(names, mesh.shape)]
    shape = mesh if isinstance(mesh, Mapping) else mesh.shape
    return [(str(name), int(size)) for name, size in shape.items()]


def mesh_coordinates(mesh: Any, rank: int, world_size: int) -> dict[str, int]:
    """Where this process sits on the mesh.

    Of a jax mesh: the coordinates of its first local device; of a DeviceMesh: its own. Of a dict of sizes whose product is
    the world size: ranks count along the last axis first. Else empty: not known.
    """
    axes = mesh_axes(mesh)
    if not axes:
        return {}
    if hasattr(mesh, "get_coordinate"):
        here = mesh.get_coordinate()
        return {name: int(at) for (name, _), at in zip(axes, here)} if here else {}
    sizes = [size for _, size in axes]
    if not isinstance(mesh, Mapping):
        place = _first_local_device(mesh)
    else:
        place = rank
        count = 1
        for size in sizes:
            count *= size
        if count != world_size:
            return {}
    if place is None:
        return {}
    coordinates = []
    for size in reversed(sizes):
        coordinates.append(place % size)
        place //= size
    return {name: index for (name, _), index in zip(axes, reversed(coordinates))}


def _first_local_device(mesh: Any) -> int | None:
    """Row-major index into the mesh of this process's first device."""
    jax = sys.modules["jax"]
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return None
    process = jax.process_index()
    owners = (device.process_index for device in mesh.devices.flat)
    return next((index for index, owner in enumerate(owners) if owner == process), None)


def versions() -> dict[str, str]:
    """Versions of what the job runs on."""
    found = {"python": platform.python_version()}
    for name in FRAMEWORKS:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found
