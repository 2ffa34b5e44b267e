"""A training step of a transformer on the GPU, with its loss head recorded and without: what a step costs
in the stream that trains, by the device's clock.

Steps go round: one that is recorded, the one behind it, while its bytes are copied and written, and one
beside neither. The model has twelve layers, computes in bf16 by autocast and is updated by AdamW.
"""

import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import backtape
import backtape.torch as bt

from .table import Outcome, rendered
from .timing import Unmeasured, between_events

LAYERS, WIDTH, HEADS, LENGTH, SEQUENCES, VOCAB = 12, 2048, 16, 1024, 8, 32_000
# The steps of a round.
RECORDED, BEHIND, ALONE = "the loss head is recorded", "the step behind it", "a step of neither kind"
ROUND = (RECORDED, BEHIND, ALONE)
# A recorded step may take this long to be on disk.
PATIENCE_S = 60


class Layer(torch.nn.Module):
    """Attention and a feed-forward of four times the width, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(torch.nn.Module):
    """Its loss on a batch; the head's tensors are tapped, which does nothing in a step that is not recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
        self.layers = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Parameter(torch.randn(VOCAB, WIDTH) / WIDTH**0.5)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q = self.norm(self.layers(self.embedding(tokens))).flatten(0, 1).bfloat16()
        q = bt.tap_grad("dq", bt.tap("q", q, microbatch=0), microbatch=0)
        k = bt.tap_grad("dk", bt.tap("k", self.head.bfloat16()))
        bt.tap("labels", labels, microbatch=0)
        return F.cross_entropy((q @ k.T).float(), labels)


class Training:
    """A job that trains on random tokens, and its recorder."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.model = Model().to("cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), device="cuda")
        self.recorder = backtape.Recorder(dir=folder, steps=f"every:{len(ROUND)}", strict=True, queue_bytes=2 << 30)
        self.number = 0

    def step(self) -> float:
        """Milliseconds of the next step in the training's stream."""
        number, self.number = self.number, self.number + 1
        return between_events(lambda: self.run(number))

    def run(self, number: int) -> None:
        with self.recorder.step(number) as tape:
            tape.head(loss="softmax_xent", path="plain", reduction="mean")
            with torch.autocast("cuda", torch.bfloat16):
                loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:].flatten())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settled(self) -> None:
        """Waits until what was recorded so far is committed, so that each round begins alike."""
        wanted, until = -(-self.number // len(ROUND)), time.monotonic() + PATIENCE_S
        while len(list(self.folder.glob("**/manifest*.json"))) < wanted:
            if time.monotonic() > until:
                raise Unmeasured(f"{wanted} steps were not committed within {PATIENCE_S} s")
            time.sleep(0.01)

    def close(self) -> None:
        summary = self.recorder.close()
        if summary is None or summary.omissions or summary.faults:
            raise Unmeasured(f"the steps were not recorded whole: {summary}")


def measure(rounds: int) -> tuple[dict[str, Outcome], int]:
    """The steps of all rounds but the first, by their kind, and the bytes of a recorded one."""
    outcomes = {kind: Outcome() for kind in ROUND}
    folder = Path(tempfile.mkdtemp(prefix="backtape-bench-"))
    try:
        job = Training(folder / "run")
        for number in range(rounds + 1):
            for kind in ROUND:
                milliseconds = job.step()
                if number:
                    outcomes[kind].milliseconds.append(milliseconds)
            job.settled()
        job.close()
        step = backtape.open(folder / "run").step(0)
        return outcomes, sum(step.tensor(name).nbytes for name in ("k", "dk")) + sum(
            step.tensor(name, microbatch=0).nbytes for name in ("q", "dq", "labels")
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def lines(rounds: int, outcomes: dict[str, Outcome]) -> list[str]:
    """The table; the outcomes go into `outcomes` too."""
    found, bytes = measure(rounds)
    outcomes.update({f"training step: {name}": outcome for name, outcome in found.items()})
    sizes = f"{LAYERS} layers of {WIDTH}, {SEQUENCES * LENGTH} tokens, {VOCAB} classes"
    title = f"a training step of {sizes}; recorded: {bytes >> 20} MiB"
    return [title, *rendered(found, ALONE)]
