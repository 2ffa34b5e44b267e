"""The compiled half of backtape; see python/src."""

from pathlib import Path
from typing import Any

from backtape.settings import Settings
from backtape.shards import Key, Shard

__version__: str

class RecorderError(Exception): ...
class PanicException(BaseException): ...

class Recorder:
    def __init__(self, settings: Settings) -> None: ...
    def wants(self, step: int) -> bool: ...
    def step(self, step: int) -> Tape: ...
    def watch(self, step: int, loss: float | None, grad_norm: float | None) -> None: ...
    def summary(self) -> Summary: ...
    def close(self) -> Summary: ...

class Tape:
    def head(self, options: dict[str, object]) -> None: ...
    def wants(self, name: str, role: str | None, microbatch: int | None) -> bool: ...
    def record(self, key: Key, shard: Shard) -> None: ...
    def omit(self, tensor: str, microbatch: int | None, reason: str) -> None: ...
    def close(self) -> None: ...

class Summary:
    shards: int
    bytes: int
    steps_committed: list[int]
    steps_partial: list[int]
    omissions: list[str]
    faults: list[str]
    orders: list[str]
    ring_dropped: int
    attempt: int | None
    directory: Path | None
    streamed: bool

def fingerprint(shard: Shard) -> tuple[int, int]: ...
def check_dtype(name: str) -> None: ...

class StepDump:
    committed: bool
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
    ) -> tuple[bytes, str, list[int]]: ...

def replay(
    path: str,
    run: str | None = None,
    attempt: int | None = None,
    step: int | None = None,
    compare: list[str] | None = None,
    against: str | None = None,
) -> tuple[str, str]: ...
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
) -> tuple[str, str]: ...
def checks(
    path: str, run: str | None = None, attempt: int | None = None, step: int | None = None
) -> tuple[str, str]: ...
def replay_main(arguments: list[str]) -> int: ...
