"""The compiled half of backtape; see python/src."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backtape.settings import Settings
from backtape.shards import Key, Shard

__version__: str
__build__: str

class RecorderError(Exception):
    """Recording failed; raised with strict=True only. The text says what, where and what to do."""

class PanicException(BaseException): ...

class Recorder:
    def __init__(self, settings: Settings) -> None: ...
    def wants(self, step: int) -> bool: ...
    def step(self, step: int) -> Tape: ...
    def scalars(self, step: int, time: float, values: list[tuple[str, float]]) -> None: ...
    def watch(self, step: int, loss: float | None, grad_norm: float | None) -> None: ...
    def trouble(self) -> str | None: ...
    def summary(self) -> Summary: ...
    def close(self) -> Summary: ...

class Tape:
    def head(
        self, options: dict[str, object], sources: dict[str, str], by_hand: dict[str, object]
    ) -> None: ...
    def wants(self, name: str, role: str | None, microbatch: int | None) -> bool: ...
    def record(self, key: Key, shards: Sequence[Shard | Copied]) -> None: ...
    def record_plain(
        self,
        staging: Staging,
        cuts: Cuts,
        memory: tuple[int, int, str],
        key: tuple[str, int | None, str | None, str | None],
    ) -> None: ...
    def omit(self, tensor: str, microbatch: int | None, reason: str) -> None: ...
    def close(self) -> None: ...

class Staging:
    def __init__(self, keep_bytes: int) -> None: ...
    def reserve(self, bytes: int) -> None: ...
    def mapped(self) -> int: ...
    def take(self, length: int) -> Block: ...
    def copy_of(self, address: int, length: int) -> Block: ...
    def copy_cuts(self, address: int, length: int, dtype: str, cuts: Cuts) -> Copied: ...

class Cuts:
    def __init__(
        self,
        shape: Sequence[int],
        boxes: Sequence[tuple[Sequence[int], Sequence[int], tuple[int, int]]],
        indices: Sequence[Sequence[Sequence[tuple[int, int]]]] | None,
        replica: int,
        placement: dict[str, int | str],
    ) -> None: ...

class Copied:
    partial: str | None
    compiled: bool

class Block:
    def __buffer__(self, flags: int) -> memoryview: ...

class Gpu:
    def __init__(self, ordinal: int, pinned: int, snapshots: int) -> None: ...
    @property
    def stream(self) -> int: ...
    def capture(
        self,
        capsule: object,
        dtype_name: str,
        ranges: list[tuple[int, int]],
        *,
        stream: int | None = None,
        changing: bool = False,
        sums: object | None = None,
        hold: object | None = None,
    ) -> Arriving | None: ...

class Arriving: ...

class Summary:
    """What one recorder did; str() is one line for the log. `Recorder.close` gives it."""

    shards: int
    """Shards that were acknowledged: durable, and in the coordinator's journal."""
    bytes: int
    """Their bytes."""
    scalar_rows: int
    """Rows of scalars that were written."""
    steps_committed: list[int]
    """Steps that the coordinator committed."""
    steps_partial: list[int]
    """Steps that it did not."""
    omissions: list[str]
    """What was to be recorded and was not, with the reason."""
    faults: list[str]
    """What went wrong."""
    orders: list[str]
    """Plans and triggers that were heard, and what became of them."""
    ring_dropped: int
    """Steps that left the ring for want of bytes."""
    attempt: int | None
    """Which launch of the run this was; None where no coordinator was reached."""
    directory: Path | None
    """Where the attempt lies."""
    streamed: bool
    """True where the coordinator wrote the files, and not this rank."""

def fingerprint(shard: Shard) -> tuple[int, int]: ...
def check_dtype(name: str) -> None: ...
def sums_of(address: int, length: int, dtype: str) -> tuple[float, int]: ...
def _bytes_of(option: str, text: str) -> int: ...
def _read_capsule(
    capsule: object, dtype_name: str, ranges: list[tuple[int, int]]
) -> tuple[bytes, tuple[int, int]]: ...

class Memory:
    @property
    def mapped_file(self) -> bool: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int) -> memoryview: ...

class Report:
    def json(self) -> str: ...
    def text(self) -> str: ...
    def html(self) -> str: ...

class StepDump:
    @property
    def committed(self) -> bool: ...
    @property
    def step(self) -> int: ...
    def __init__(
        self, path: str, run: str | None = None, attempt: int | None = None, step: int | None = None
    ) -> None: ...
    def manifest(self) -> str: ...
    def keys(self) -> list[tuple[str, int | None, str | None]]: ...
    def tensor(
        self,
        name: str,
        microbatch: int | None = None,
        when: str | None = None,
        rank: int | None = None,
    ) -> tuple[Memory, str, list[int]]: ...

def replay(
    path: str,
    run: str | None = None,
    attempt: int | None = None,
    step: int | None = None,
    compare: list[str] | None = None,
    against: str | None = None,
    mapping: str | None = None,
    report: str | None = None,
    draws: bool = False,
    device: str | None = None,
    causes: str = "quick",
) -> Report: ...
def variant_inputs(
    path: str, run: str | None = None, attempt: int | None = None, step: int | None = None
) -> list[dict[str, Any]]: ...
def replay_varied(
    path: str,
    variants: list[tuple[str, list[tuple[str, int | None, int | None, bytes, str]]]],
    run: str | None = None,
    attempt: int | None = None,
    step: int | None = None,
    compare: list[str] | None = None,
    report: str | None = None,
    draws: bool = False,
    device: str | None = None,
    causes: str = "quick",
) -> Report: ...
def checks(
    path: str, run: str | None = None, attempt: int | None = None, step: int | None = None
) -> Report: ...
def trajectory(
    path: str,
    run: str | None = None,
    attempt: int | None = None,
    vocabulary: int | None = None,
    local: list[str] | None = None,
    shared: list[str] | None = None,
) -> Report: ...
def dumped_steps(path: str, run: str | None = None, attempt: int | None = None) -> list[int]: ...
def head_options() -> tuple[list[tuple[str, str, str, str, str]], list[tuple[str, str, str, str, str]]]: ...
def stages() -> list[str]: ...
def recompute_stage(
    dump: StepDump,
    name: str,
    microbatch: int | None = None,
    rank: int | None = None,
    from_captured: bool = True,
    policy: str | None = None,
    tokens: tuple[int, int] | None = None,
) -> tuple[Memory, list[int]]: ...
def probe_device(ordinal: int) -> str: ...
def probe_store(place: str) -> list[tuple[str, bool, str]]: ...
def probe_coordinator(
    address: str, run: str, credentials: str | None = None
) -> tuple[str, str, float, str]: ...
def perform_task(task: bytes, sums: list[bytes | None], threads: int) -> list[bytes]: ...
def replay_main(
    arguments: list[str], connect: Callable[[str | None, int], object] | None = None
) -> int: ...
def coordinator_main(arguments: list[str]) -> int: ...
