"""What decides on a GPU who is timed, on a CPU: the reference, its bounds and the checks of every
contender that a CPU can run; that one that is wrong or missing keeps its row; what is read off the
profiler; and that what is recorded and loaded are the same bytes."""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[1] / "benches"))

from gpu import activity, capture, card, crossentropy, head, loading, losses, table, timing  # noqa: E402
from gpu.head import Policy, Result, Shape  # noqa: E402

SMALL = Shape(96, 512, 64)
TIMED = Shape(128, 1000, 48)


@pytest.fixture(scope="module")
def small():
    return head.random_head(SMALL, "cpu", 1)


@pytest.fixture(scope="module")
def right(small):
    return head.whole(small)


@pytest.fixture(scope="module")
def given(small):
    return losses.stepping(losses.eager, small)()


def test_the_reference_is_what_autograd_gives_in_f64(small, right):
    q, k = (matrix.double().requires_grad_() for matrix in (small.q, small.k))
    loss = F.cross_entropy(q @ k.T, small.labels)
    loss.backward()
    assert right.loss == pytest.approx(loss.item(), rel=1e-13)
    for wanted, got in ((q.grad, right.dq.right), (k.grad, right.dk.right)):
        assert torch.allclose(got, wanted, rtol=1e-11, atol=1e-15)


def test_labels_have_probabilities_from_near_0_to_near_1(small):
    p = (small.q.double() @ small.k.double().T).softmax(1)[range(SMALL.tokens), small.labels]
    assert p.min() < 0.1 and p.max() > 0.9


def test_chunks_and_samples_are_parts_of_the_whole(small, right, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_BYTES", 8 * SMALL.vocab * 7)
    chunked = head.whole(small)
    assert chunked.loss == pytest.approx(right.loss) and chunked.loss_off == pytest.approx(right.loss_off)
    assert torch.allclose(chunked.dk.magnitude, right.dk.magnitude)
    some = head.sampled(small, 3, count=8)
    assert {0, SMALL.tokens - 1} <= set(some.tokens.tolist()) and SMALL.vocab - 1 in some.classes
    for got, whole, rows in ((some.dq, right.dq, some.tokens), (some.dk, right.dk, some.classes)):
        for part in ("right", "off", "magnitude"):
            wanted = getattr(whole, part)[rows]
            assert torch.allclose(getattr(got, part), wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


def test_a_right_contender_passes(given, right, small):
    head.check(given, right, Policy())
    some = head.sampled(small, 3)
    head.check(given, some, Policy())
    rows = Result(given.loss, given.dq[some.tokens], given.dk[some.classes], some.tokens, some.classes)
    head.check(rows, some, Policy())


def changed(tensor, at, to):
    copy = tensor.clone()
    copy[at] = to
    return copy


def without_labels(small):
    p = (small.q.double() @ small.k.double().T).softmax(1) / SMALL.tokens
    return p @ small.k.double(), p.T @ small.q.double()


WRONG = {
    "dq of zeros": lambda r, h: Result(r.loss, 0 * r.dq, r.dk),
    "dk of zeros": lambda r, h: Result(r.loss, r.dq, 0 * r.dk),
    "dq of another scale": lambda r, h: Result(r.loss, 1.5 * r.dq, r.dk),
    "dk of another scale": lambda r, h: Result(r.loss, r.dq, 1.5 * r.dk),
    "a sum in the place of a mean": lambda r, h: Result(r.loss, SMALL.tokens * r.dq, SMALL.tokens * r.dk),
    "rows of other tokens": lambda r, h: Result(r.loss, r.dq.roll(1, 0), r.dk),
    "one row of dk missing": lambda r, h: Result(r.loss, r.dq, changed(r.dk, int(h.labels[5]), 0)),
    "one NaN": lambda r, h: Result(r.loss, changed(r.dq, (3, 5), torch.nan), r.dk),
    "an infinity": lambda r, h: Result(r.loss, r.dq, changed(r.dk, (3, 5), torch.inf)),
    "a loss of NaN": lambda r, h: Result(torch.nan, r.dq, r.dk),
    "a loss that is 5 % off": lambda r, h: Result(1.05 * r.loss, r.dq, r.dk),
    "gradients without the labels": lambda r, h: Result(r.loss, *without_labels(h)),
    "dq of another shape": lambda r, h: Result(r.loss, r.dq[:, :-1], r.dk),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_contender_is_not_timed(fault, given, right, small):
    with pytest.raises(timing.Unmeasured, match="^wrong: "):
        head.check(WRONG[fault](given, small), right, Policy())


GROSS = ["dq of zeros", "dk of zeros", "rows of other tokens", "gradients without the labels"]


@pytest.mark.parametrize("fault", GROSS)
def test_a_policy_of_many_roundings_and_a_filter_excuses_no_fault(fault, given, small):
    policy, right = losses.by_tiles(SMALL), head.whole(small, losses.CCE_FILTER)
    head.check(given, right, policy)
    with pytest.raises(timing.Unmeasured, match="^wrong: "):
        head.check(WRONG[fault](given, small), right, policy)


def test_what_a_filter_says_it_leaves_out_it_may_leave_out(small):
    limit = 0.02
    onehot = F.one_hot(small.labels, SMALL.vocab)
    entries = (small.q.double() @ small.k.double().T).softmax(1) - onehot
    kept = torch.where(entries.abs() < limit, 0, entries) / SMALL.tokens
    loss = F.cross_entropy(small.q.double() @ small.k.double().T, small.labels)
    result = Result(loss, kept @ small.k.double(), kept.T @ small.q.double())
    head.check(result, head.whole(small, limit), Policy())
    with pytest.raises(timing.Unmeasured, match="^wrong: "):
        head.check(result, head.whole(small), Policy())


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(losses, "SMALL", SMALL)
    return losses.Bench.of(TIMED, "cpu", 1)


@pytest.mark.parametrize("name", ["torch, eager", "torch linear_cross_entropy"])
def test_contenders_that_run_on_a_cpu_agree(bench, name):
    contestant = losses.CONTESTANTS[name]
    loss = contestant.make()
    bench.agree(lambda of: losses.stepping(loss, of)(), contestant)


def peers_that_are_called_as_documented(monkeypatch):
    """Modules with the peers' signatures, and torch in their place."""

    class Liger(torch.nn.Module):
        def forward(self, lin_weight, _input, target, bias=None):
            return losses.eager(_input, lin_weight, target)

    def cce(e, c, targets, bias=None, ignore_index=-100, *, impl="cce"):
        assert impl in ("cce", "cce_exact")
        return losses.eager(e, c, targets)

    modules = {
        "cut_cross_entropy": SimpleNamespace(linear_cross_entropy=cce),
        "liger_kernel": SimpleNamespace(),
        "liger_kernel.transformers": SimpleNamespace(LigerFusedLinearCrossEntropyLoss=Liger),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", ["CCE", "CCE, exact", "Liger-Kernel"])
def test_peers_are_handed_q_k_and_labels_in_their_own_order(name, bench, monkeypatch):
    peers_that_are_called_as_documented(monkeypatch)
    contestant = losses.CONTESTANTS[name]
    loss = contestant.make()
    bench.agree(lambda of: losses.stepping(loss, of)(), contestant)


def by_host(run):
    """In the place of the device's clock, on a machine without one."""

    def turn():
        begin = time.perf_counter()
        run()
        return timing.Turn(1e3 * (time.perf_counter() - begin), 0)

    return turn


def test_all_contenders_have_a_row_and_those_that_cannot_run_a_reason(monkeypatch):
    def wrong():
        return lambda q, k, labels: 1.5 * losses.eager(q, k, labels)

    def missing():
        return losses.imported("no_such_peer.kernels", "loss")

    peers = {"torch, eager": losses.CONTESTANTS["torch, eager"]}
    peers |= {"fast and wrong": losses.Contestant(wrong), "missing": losses.Contestant(missing)}
    monkeypatch.setattr(losses, "CONTESTANTS", peers)
    monkeypatch.setattr(losses, "SMALL", SMALL)
    monkeypatch.setattr(losses, "on_device", by_host)
    found = crossentropy.measure(TIMED, 1, 3, lambda name: True, sys.executable, "cpu")
    assert list(found) == [*peers, crossentropy.XLA]
    assert found["missing"].reason.startswith("no_such_peer cannot be imported: ModuleNotFoundError")
    assert found["fast and wrong"].reason.startswith("wrong: its loss is")
    assert found["fast and wrong"].reason.endswith(f"at {SMALL}")
    for name in ("torch, eager", crossentropy.XLA):
        assert found[name].reason is None and len(found[name].milliseconds) == 3, found[name]
    lines = crossentropy.report(TIMED, found, card.Ceilings(bf16_gemm=100.0))
    assert len(lines) == 3 + len(found) and all(any(name in line for line in lines) for name in found)


def test_xla_without_its_environment_is_named(monkeypatch):
    monkeypatch.setattr(losses, "SMALL", SMALL)
    found = crossentropy.measure(TIMED, 1, 1, lambda name: name == crossentropy.XLA, "/no/such/python", "cpu")
    assert found[crossentropy.XLA].reason == "there is no environment with jax at /no/such/python"


def test_xla_on_a_machine_without_a_gpu_says_why(monkeypatch):
    monkeypatch.setattr(losses, "SMALL", SMALL)
    monkeypatch.setattr(crossentropy, "start_xla", lambda python, folder, _: start(python, folder, "cuda"))
    found = crossentropy.measure(TIMED, 1, 1, lambda name: name == crossentropy.XLA, sys.executable, "cpu")
    assert found[crossentropy.XLA].reason.startswith("XLA (jax): "), found


start = crossentropy.start_xla


def test_the_gemm_ceiling_is_the_time_of_three_products():
    shape = Shape(1000, 1000, 1000)
    found = {"torch, eager": table.Outcome([6.0])}
    # 3 products of 2e9 operations at 1 TFLOP/s take 6 ms.
    lines = crossentropy.report(shape, found, card.Ceilings(bf16_gemm=1.0))
    assert "100.0 %" in lines[-1]
    assert "%" not in crossentropy.report(shape, found, card.Ceilings())[-1]


def test_ceilings_are_shown_or_said_to_be_missing():
    lines = card.lines(card.Ceilings(copy=2e9, to_host=5e7, bf16_gemm=400.0))
    text = "\n".join(lines)
    assert "2000 GB/s" in text and "50 GB/s" in text and "400 TFLOP/s" in text
    assert text.count("not measured") == 2
    assert card.needed(1000, 100.0) == 10 and card.needed(1000, None) is None and card.needed(1, 0.0) is None


def test_only_what_a_device_did_is_taken_from_the_profiler():
    event = lambda name, kind: SimpleNamespace(
        name=name, device_type=f"DeviceType.{kind}", time_range=SimpleNamespace(start=1, end=3)
    )
    found = list(capture.spans([event("aten::copy_", "CPU"), event("fingerprint", "CUDA")]))
    assert found == [("fingerprint", 1, 3)]


def test_a_step_of_jax_arrays_is_recorded_by_a_program_of_its_own():
    size, seen = capture.in_jax(sys.executable, 1, 2, "cpu")
    # A CPU has no streams of a device; the bytes were compared.
    assert size == 1 << 20 and seen == [activity.Activity(names=[])] * 2
    with pytest.raises(timing.Unmeasured, match="there is no environment with jax at /no/such/python"):
        capture.in_jax("/no/such/python", 1, 1)


def test_a_step_of_jax_arrays_without_a_gpu_has_a_reason():
    with pytest.raises(timing.Unmeasured):
        capture.in_jax(sys.executable, 1, 1, "cuda")


@pytest.fixture
def tensors(monkeypatch):
    monkeypatch.setattr(capture, "TENSOR_BYTES", 1 << 18)
    return capture.random_tensors(3 << 18, "cpu")


def test_what_is_recorded_has_the_bytes_of_the_tensors(tensors, monkeypatch):
    assert len(tensors) == 3 and capture.nbytes(tensors) == 3 << 18
    capture.agree(tensors)
    read = capture.backtape.open

    def other(folder):
        step = read(folder).step(1)
        zeros = lambda name: np.zeros_like(step.tensor(name))
        return SimpleNamespace(step=lambda _: SimpleNamespace(tensor=zeros))

    monkeypatch.setattr(capture.backtape, "open", other)
    with pytest.raises(timing.Unmeasured, match="wrong: the dump of x0 has other bytes"):
        capture.agree(tensors)


def test_a_dump_is_loaded_by_every_reader_that_is_here(tensors, tmp_path):
    files = loading.dump(tmp_path / "run", tensors)
    loads = loading.contenders(tmp_path / "run", files, tensors, "cpu")
    for name in ("backtape.open, numpy, to(cuda)", "safetensors load_file"):
        loading.same(loads[name](), tensors)
    loading.drop(files)
    loading.same(loads["safetensors load_file"](), tensors)


def test_a_reader_that_is_wrong_or_missing_is_not_timed(tensors, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastsafetensors", None)
    loads = loading.contenders(tmp_path, [], tensors, "cpu")
    ready = {name: loading.checked(load, tensors) for name, load in loads.items()}
    less = dict(list(tensors.items())[:2])
    flipped = tensors | {"x1": tensors["x1"].neg()}
    elsewhere = {name: tensor.to("meta") for name, tensor in tensors.items()}
    for name, got in (("less", less), ("flipped", flipped), ("elsewhere", elsewhere)):
        ready[name] = loading.checked(lambda got=got: got, tensors)
    found = timing.interleaved(ready, 1)
    assert "fastsafetensors cannot be imported" in found["fastsafetensors, bounce buffer"].reason
    assert found["less"].reason == "wrong: it gave the tensors x0, x1"
    assert found["flipped"].reason == "wrong: x1 has other bytes"
    assert found["elsewhere"].reason == "wrong: x0 is on meta"


def printing(*lines):
    """A command that prints these objects, whatever it is asked."""
    text = "\n".join(map(json.dumps, lines))
    return shlex.join([sys.executable, "-c", f"print({text!r})"])


def test_every_line_runs_from_end_to_end_with_this_process_for_a_card():
    passes = [
        {"line": "pass", "pass": name, "tokens": 128, "vocab": 1000, "depth": 48, "milliseconds": [1.0, 2.0],
         "flop": 1.0, "teraflops": 1.0, "of_gemm": 0.5, "peak_bytes": None}
        for name in ("dgemm", "forward", "backward")
    ]  # fmt: skip
    options = ["--shape", "128,1000,48", "--rounds", "2", "--megabytes", "2", "--only", "eager,CCE,Liger,XLA",
               "--xla-python", sys.executable, "--reference", printing(*passes)]  # fmt: skip
    program = Path(__file__).with_name("no_card.py")
    ended = subprocess.run([sys.executable, program, *options], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows: dict[str, str] = {}
    for line in ended.stdout.splitlines():
        if line.startswith("  "):
            rows.setdefault(line[:36].strip(), line)
    measured = [
        "copy on the device", "torch, eager", "XLA (jax)", "forward T128 V1000 D48", "work alone",
        "backtape, a recorded step", "backtape, durable and committed", "copies to the host, busy",
        "kernels (the checksum)", "backtape.open, numpy, to(cuda)", "safetensors load_file",
        "the loss head is recorded", "a step of neither kind", "the CPU",
    ]  # fmt: skip
    for name in measured:
        assert name in rows and "not measured" not in rows[name], (name, ended.stdout)
    for name in ("CCE", "CCE, exact", "Liger-Kernel", "fastsafetensors, GPUDirect", "the GPU"):
        assert "not measured: " in rows[name], (name, ended.stdout)
    assert "f64 take" in ended.stdout and "no card, compute capability 9.0" in ended.stdout


def test_a_line_of_ours_that_fails_is_told_and_makes_the_exit_code_1():
    program = Path(__file__).with_name("no_card.py")
    options = ["--lines", "reference", "--reference", "/no/such/cargo"]
    ended = subprocess.run([sys.executable, program, *options], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1, ended.stderr
    assert "reference: not measured: /no/such/cargo does not start" in ended.stdout
