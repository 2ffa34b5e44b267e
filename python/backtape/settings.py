"""The settings of a recorder, and the environment variables that give them.

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backtape.frameworks import imported, used

# Variables in which launchers give a process its rank and the number of ranks. The first pair of
# which both are set holds, as torchrun may run inside srun; half of one pair and half of another is
# no rank. SLURM_NTASKS is not among them: a batch script, which is one process, has it too.
LAUNCHERS = (
    ("BACKTAPE_RANK", "BACKTAPE_WORLD_SIZE"),
    ("RANK", "WORLD_SIZE"),
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)

# Packages whose versions go into run.json, where the job has imported them.
FRAMEWORKS = ("numpy", "ml_dtypes", "jax", "jaxlib", "torch")

# Settings that the recorder reads from text, such as "0-3,7" or "512MiB".
SPELLED = ("tensors", "ranks", "microbatches", "max_tensor_bytes", "max_step_bytes", "ring_bytes")

# Settings that the environment gives as numbers.
NUMBERS = (
    ("attempt", int), ("ring", int), ("trigger_grad_norm", float), ("trigger_spread", float),
    ("close_patience_s", float),
)  # fmt: skip

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass
class Settings:
    """Settings of one recorder, as `backtape._native.Recorder` reads them.

    `None` leaves the recorder's default. Names that end in _s are in seconds, those in _bytes in
    bytes.
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
    """The truth value that an environment variable spells. Raises ValueError for any other word."""
    if word.lower() in TRUE:
        return True
    if word.lower() in FALSE:
        return False
    raise ValueError(f"{name}={word!r}: write 1 or 0")


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments of `Recorder` that the environment gives. Raises ValueError for a variable that
    cannot be read."""
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

    backtape's own variables come first, then a framework that was initialised with them
    (`jax.distributed.initialize`, `torch.distributed.init_process_group`), then the launcher's
    variables. A process that no launcher has started is rank 0 of 1.
    """
    own, *launchers = LAUNCHERS
    found = _pair(environment, own) or _jax_process() or _torch_process()
    return found or next(filter(None, (_pair(environment, pair) for pair in launchers)), (0, 1))


def _pair(environment: Mapping[str, str], names: tuple[str, str]) -> tuple[int, int] | None:
    values = [environment.get(name, "").strip() for name in names]
    return (int(values[0]), int(values[1])) if all(values) else None


def _jax_process() -> tuple[int, int] | None:
    jax = imported("jax")
    if jax is None or not jax.distributed.is_initialized():
        return None
    return jax.process_index(), jax.process_count()


def _torch_process() -> tuple[int, int] | None:
    distributed = imported("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def mesh_axes(mesh: Any) -> list[tuple[str, int]]:
    """The names and sizes of a mesh's axes, outermost first. A mesh is a dict of sizes, a jax mesh or a
    torch DeviceMesh."""
    if mesh is None:
        return []
    if hasattr(mesh, "get_coordinate"):
        names = mesh.mesh_dim_names or [f"axis{i}" for i in range(mesh.ndim)]
        return [(str(name), int(size)) for name, size in zip(names, mesh.shape)]
    shape = mesh if isinstance(mesh, Mapping) else mesh.shape
    return [(str(name), int(size)) for name, size in shape.items()]


def mesh_coordinates(mesh: Any, rank: int, world_size: int) -> dict[str, int]:
    """Where this process sits on the mesh: its index on each axis; empty where that is not known.

    On a jax mesh it is where its first local device sits; a torch DeviceMesh says it. On a dict of
    sizes it is known if their product is the world size: ranks then count along the last axis
    first.
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
    """The row-major index in a jax mesh of this process's first device; None where it has none."""
    jax = used("jax")
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return None
    process = jax.process_index()
    owners = (device.process_index for device in mesh.devices.flat)
    return next((index for index, owner in enumerate(owners) if owner == process), None)


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that the job has imported, by name."""
    found = {"python": platform.python_version()}
    for name in FRAMEWORKS:
        version = getattr(imported(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found
