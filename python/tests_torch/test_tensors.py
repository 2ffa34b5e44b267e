"""torch tensors in one process: bytes, copies, taps, checkpointing, torch.compile."""

import numpy as np
import oracle
import pytest
import reading
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import backtape
import backtape.torch
from backtape._native import Staging
from backtape.torch import tap, tap_grad


def recorder(tmp_path, **options):
    return backtape.Recorder(dir=tmp_path / "run", **{"strict": True, "steps": "0-99"} | options)


def step_of(tmp_path, step=0):
    return backtape.open(tmp_path / "run").step(step)


DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_every_dtype_are_kept(tmp_path, dtype):
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 5 * dtype.itemsize), dtype=torch.uint8)
    tensor = bits.view(dtype)
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        tape.record("x", tensor)
        tape.record("turned", tensor.T)
        tape.record("none", tensor[:0])
        tape.record("one", tensor[0, 0])
    entries = {entry.record["tensor"]: entry for entry in reading.entries(tmp_path / "run")}
    found = step_of(tmp_path)
    assert found.tensor("x").tobytes() == bits.numpy().tobytes()
    assert found.tensor("turned").tobytes() == tensor.T.contiguous().view(torch.uint8).numpy().tobytes()
    assert found.tensor("none").shape == (0, 5) and found.tensor("one").shape == ()
    assert tuple(entries["x"].record["fingerprint"]) == oracle.fingerprint(found.tensor("x"))


def test_what_is_changed_after_the_call_was_copied_before(tmp_path):
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        values = torch.arange(1000.0)
        for i in range(50):
            tape.record("x", values, microbatch=i)
            values += 1
    for i in range(50):
        assert step_of(tmp_path).tensor("x", microbatch=i)[0] == i


def test_a_run_of_a_flattened_tensor_is_cut_into_boxes_that_make_it_up(tmp_path):
    draw = np.random.default_rng(3)
    shapes = [(7,), (4, 5), (3, 4, 5), (2, 1, 3, 2), ()]
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        for number, shape in enumerate(shapes):
            whole = torch.arange(int(np.prod(shape)), dtype=torch.float32)
            ends = sorted({0, whole.numel(), *draw.integers(0, whole.numel() + 1, 4).tolist()})
            for a, b in zip(ends, ends[1:]):
                tape.record(f"x{number}", whole[a:b], global_shape=shape, flat_offset=a)
    for number, shape in enumerate(shapes):
        whole = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
        assert np.array_equal(step_of(tmp_path).tensor(f"x{number}"), whole)


def test_taps_record_a_value_and_the_gradient_that_flows_through_it(tmp_path):
    torch.manual_seed(0)
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        for i in range(2):
            q = tap_grad("dq", tap("q", torch.tanh(x * (i + 1)), microbatch=i), microbatch=i)
            k = tap_grad("dk", weight, microbatch=i)
            F.linear(q, k).square().sum().backward()
        assert tape.active
    step = step_of(tmp_path)
    total = sum(step.tensor("dk", microbatch=i) for i in range(2))
    assert np.allclose(total, weight.grad.numpy(), rtol=1e-6)
    q = torch.tanh(x.detach() * 2).requires_grad_()
    F.linear(q, weight).square().sum().backward()
    assert np.array_equal(step.tensor("dq", microbatch=1), q.grad.numpy())
    assert np.array_equal(step.tensor("q", microbatch=1), q.detach().numpy())


def test_outside_a_recorded_step_a_tap_is_its_argument(tmp_path):
    x = torch.ones(3, requires_grad=True)
    assert tap("q", x) is x and tap_grad("dq", x) is x
    with recorder(tmp_path, steps="5") as recording, recording.step(0):
        assert tap_grad("dq", x) is x


def test_a_gradient_that_never_comes_and_one_that_cannot_are_named(tmp_path):
    with recorder(tmp_path, strict=False) as recording:
        with recording.step(0):
            tap_grad("dq", torch.ones(2, requires_grad=True), microbatch=3)
            tap_grad("dk", torch.ones(2))
    found = {(o["tensor"], o["microbatch"]): o["reason"] for o in reading.manifest(tmp_path / "run")["omissions"]}
    assert "no gradient reached its tap" in found["dq", 3]
    assert "does not require a gradient" in found["dk", None]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_is_marked_and_compared(tmp_path, reentrant):
    torch.manual_seed(0)
    x = torch.randn(4, 3, requires_grad=True)
    noise = iter([1.0, 2.0])

    def block(x, noisy):
        q = tap("noisy" if noisy else "q", torch.sin(x) * (next(noise) if noisy else 1.0))
        return torch.sin(tap_grad("dnoisy" if noisy else "dq", q))

    with recorder(tmp_path) as recording, recording.step(0):
        for noisy in (False, True):
            checkpoint(block, x, noisy, use_reentrant=reentrant).sum().backward()
    step = step_of(tmp_path)
    assert np.array_equal(step.tensor("q"), step.tensor("q", when="recompute"))
    assert np.array_equal(step.tensor("noisy") * 2, step.tensor("noisy", when="recompute"))
    assert np.array_equal(step.tensor("dq"), torch.cos(torch.sin(x.detach())).numpy())
    report = backtape.checks(tmp_path / "run")
    (found,) = [one for one in report.findings if one.check == "recompute"]
    assert (found.tensor, found.severity) == ("noisy", "fail")


def test_in_compiled_code_taps_record_and_say_so_and_change_no_bit(tmp_path):
    torch.manual_seed(0)
    weight = torch.randn(8, 8)

    @torch.compile(backend="aot_eager")
    def forward(x):
        q = tap_grad("dq", tap("q", torch.tanh(x @ weight)))
        return torch.tanh(q @ weight).sum()

    def gradient():
        x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
        loss = forward(x)
        loss.backward()
        return loss.detach(), x.grad

    off = gradient()
    with recorder(tmp_path) as recording, recording.step(0):
        on = gradient()
    assert all(torch.equal(a, b) for a, b in zip(off, on))
    entries = {entry.record["tensor"]: entry.record for entry in reading.entries(tmp_path / "run")}
    assert entries["q"]["compiled"] and entries["dq"]["compiled"]
    assert np.array_equal(
        step_of(tmp_path).tensor("q"), torch.tanh(torch.linspace(-1, 1, 32).reshape(4, 8) @ weight).numpy()
    )


def test_what_has_no_bytes_is_refused_by_name_and_the_job_goes_on(tmp_path):
    with recorder(tmp_path, strict=False) as recording, recording.step(0) as tape:
        tape.record("meta", torch.empty(2, device="meta"))
        tape.record("sparse", torch.eye(3).to_sparse())
        tape.record("complex", torch.zeros(2, dtype=torch.complex64))
        tape.record("here", torch.ones(2))
    reasons = {o["tensor"]: o["reason"] for o in reading.manifest(tmp_path / "run")["omissions"]}
    assert "no bytes" in reasons["meta"] and "sparse" in reasons["sparse"]
    assert "complex64" in reasons["complex"]
    assert step_of(tmp_path).tensor("here").tolist() == [1, 1]


def test_staging_memory_is_used_again_and_bounded(tmp_path):
    pool = Staging(64 << 20)
    for _ in range(100):
        block = pool.take(10 << 20)
        memoryview(block)[:4] = b"held"
        del block
    assert pool.mapped() == 16 << 20
    held = [pool.take(5 << 20) for _ in range(3)]
    assert pool.mapped() == 16 << 20
    del held
    for size in range(1, 30):
        pool.take(size << 20)
    assert pool.mapped() <= 64 << 20


def test_losses_and_gradients_are_the_same_bits_with_recording_on_and_off(tmp_path):
    def train(recording):
        torch.manual_seed(0)
        embed, head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50, bias=False)
        parameters = [*embed.parameters(), *head.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        draw = torch.Generator().manual_seed(1)
        losses, norms = [], []
        for step in range(200):
            tokens = torch.randint(50, (33,), generator=draw)
            with recording.step(step) as tape:
                q = embed(tokens[:-1]).bfloat16()
                q = tap_grad("dq", tap("q", q, microbatch=0), microbatch=0)
                k = tap_grad("dk", head.weight, microbatch=0)
                loss = F.cross_entropy(F.linear(q, k.bfloat16()).float(), tokens[1:])
                loss.backward()
                tape.record("grad_norm", torch.nn.utils.clip_grad_norm_(parameters, 1.0))
                norms.append([p.grad.clone() for p in parameters])
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses), norms

    with backtape.Recorder(steps=None) as none:
        losses, gradients = train(none)
    with recorder(tmp_path, steps="0-199") as recording:
        on = train(recording)
        summary = recording.close()
    assert len(summary.steps_committed) == 200 and summary.shards == 800
    assert torch.equal(losses, on[0])
    assert all(torch.equal(a, b) for one, two in zip(gradients, on[1]) for a, b in zip(one, two))
