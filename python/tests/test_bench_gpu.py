"""`make bench-gpu` without a GPU: what it says then, its arguments, its arithmetic, and that a
contender that is missing or fails keeps its row, with the reason."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python" / "benches"))

from gpu import activity, children, reference, table, timing  # noqa: E402
from gpu.__main__ import LINES, missing_gpu, plan, told  # noqa: E402

NO_GPU = not Path("/dev/nvidiactl").exists()


@pytest.mark.skipif(not NO_GPU, reason="this machine has a GPU")
def test_without_a_gpu_make_says_so_and_installs_nothing():
    # pytest may itself be run by a make, which would say more.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    ended = subprocess.run(["make", "bench-gpu"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "no GPU: nothing measured\n"), ended


@pytest.mark.skipif(not NO_GPU, reason="this machine has a GPU")
def test_without_a_gpu_the_program_says_so_in_one_sentence():
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python" / "benches")}
    ended = subprocess.run([sys.executable, "-m", "gpu"], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("no GPU: nothing measured: ") and ended.stdout.count("\n") == 1


@pytest.mark.skipif(not NO_GPU, reason="this machine has a GPU")
def test_a_gpu_that_is_not_seen_is_a_fault(tmp_path):
    sentence, code = missing_gpu(tmp_path)
    assert code == 1 and sentence.startswith(f"the GPU is not seen, nothing measured, though {tmp_path} is there: ")
    assert missing_gpu(tmp_path / "none")[1] == 0


def test_a_line_that_fails_as_a_whole_leaves_the_others():
    def fails():
        raise timing.Unmeasured("the dump was not written")

    assert told("loading", fails) == (["loading: not measured: the dump was not written"], False)
    assert told("loss", lambda: ["a table"]) == (["a table"], True)


def test_arguments_become_a_plan():
    usual = plan([])
    assert usual.lines == LINES and usual.shape == (8192, 256_000, 2304) and usual.rounds == 7
    assert usual.wanted("anything") and usual.reference[:2] == ("cargo", "bench")
    less = plan(["--lines", "loss,loading", "--shape", "8,16,4", "--only", "cce,XLA", "--reference", "a 'b c'"])
    assert less.lines == ("loss", "loading") and less.shape == (8, 16, 4)
    assert less.wanted("CCE, exact") and less.wanted("XLA (jax)") and not less.wanted("Liger-Kernel")
    assert less.reference == ("a", "b c")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--lines", "loss,nothing"], "not nothing"),
        (["--lines", ""], "not none"),
        (["--shape", "8,16"], "a shape is T,V,D"),
        (["--rounds", "0"], "0 is not at least 1"),
        (["--rounds", "many"], "invalid"),
    ],
)
def test_an_argument_that_means_nothing_is_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        plan(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def turns(*milliseconds, peak=None):
    """A contender that takes these, its uncounted round first."""
    left = iter(milliseconds)
    return lambda: timing.Turn(next(left), peak)


def test_ratios_are_medians_within_rounds_and_not_of_medians():
    one, other = table.Outcome([1.0, 10.0, 100.0]), table.Outcome([2.0, 40.0, 100.0])
    assert table.ratio(one, other) == (0.5, 0.25, 1.0)
    assert table.spread([3.0, 1.0, 2.0, 4.0]) == (2.5, 1.0, 4.0)


def test_the_first_round_is_not_counted_and_each_round_begins_with_another():
    assert list(timing.orders(["a", "b", "c"], 4)) == [
        ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]
    ]  # fmt: skip
    found = timing.interleaved({"a": turns(99, 1, 2, peak=5), "b": turns(99, 3, 4)}, 2)
    assert found["a"].milliseconds == [1, 2] and found["a"].peak_bytes == 5
    assert found["b"].milliseconds == [3, 4] and found["b"].peak_bytes is None


def test_who_fails_is_out_with_its_reason_and_the_others_go_on():
    def missing():
        raise timing.Unmeasured("cut_cross_entropy cannot be imported: no such module")

    found = timing.interleaved({"gone": missing, "late": turns(1, 2), "good": turns(9, 8, 7, 6)}, 3)
    assert found["gone"].reason == "cut_cross_entropy cannot be imported: no such module"
    # The third turn of it raises: a StopIteration without a text.
    assert found["late"].reason == "StopIteration: no reason given" and not found["late"].milliseconds
    assert found["good"].milliseconds == [8, 7, 6]


def test_the_table_names_everyone():
    found = {
        "torch, eager": table.Outcome([10.0, 20.0], peak_bytes=3 << 30),
        "CCE": table.Outcome([5.0, 5.0], note="leaves out entries"),
        "Liger-Kernel": table.Outcome(reason="wrong: its loss is nan, 1.0 is right"),
        "XLA": table.Outcome(),
    }
    lines = table.rendered(found, "torch, eager", ceiling=2.5, of="of the GEMM ceiling")
    assert lines[0] == "  time over that of torch, eager" and "share: of the GEMM ceiling" in lines[1]
    of = {line.split("  ")[1].strip(): line for line in lines[2:]}
    assert "1.000x" in of["torch, eager"] and "3.00 GiB" in of["torch, eager"] and "16.7 %" in of["torch, eager"]
    assert "0.375x" in of["CCE"] and "(0.25, 0.50)" in of["CCE"] and "50.0 %" in of["CCE"]
    assert of["CCE"].endswith("leaves out entries")
    assert of["Liger-Kernel"].endswith("not measured: wrong: its loss is nan, 1.0 is right")
    assert of["XLA"].endswith("not measured: it has no rounds")


def test_ratios_are_over_another_where_the_base_is_missing_and_it_says_so():
    found = {"base": table.Outcome(reason="gone"), "one": table.Outcome([2.0]), "two": table.Outcome([4.0])}
    lines = table.rendered(found, "base")
    assert lines[0] == "  time over that of one, as base was not measured"
    assert any(line.startswith("  two") and "2.000x" in line for line in lines)
    nobody = table.rendered({"base": table.Outcome(reason="gone")}, "base")
    assert nobody[0] == "  nothing was measured" and nobody[1].endswith("not measured: gone")


def test_the_clock_of_the_host_gives_ratios_alone():
    lines = table.rendered({"a": table.Outcome([123.456])}, "a", times=False)
    assert not any("123" in line or " ms" in line for line in lines)


def test_a_long_reason_is_one_line():
    said = timing.reason_of(RuntimeError("one\ntwo " + "x" * 1000))
    assert said.startswith("RuntimeError: one two xxx") and said.endswith("...") and len(said) < 300
    assert timing.most(None, 3) == 3 and timing.most(None, None) is None


CHILD = """
import json, sys
print("a library's banner")
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "die":
        sys.exit("libcuda.so.1 was not found")
    if asked["do"] == "fail":
        print(json.dumps({"error": "out of memory"}), flush=True)
    else:
        print(json.dumps({"milliseconds": 2.5, "peak_bytes": 7}), flush=True)
"""


def test_a_program_beside_this_one_is_asked_and_answers():
    child = children.Child("a peer", [sys.executable, "-c", CHILD])
    assert child.turn() == timing.Turn(2.5, 7)
    with pytest.raises(timing.Unmeasured, match="^a peer: out of memory$"):
        child.ask(do="fail")
    with pytest.raises(timing.Unmeasured, match="a peer ended without an answer: libcuda.so.1 was not found"):
        child.ask(do="die")
    child.close()


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(timing.Unmeasured, match="a peer does not start"):
        children.Child("a peer", ["/no/such/python"])


def printing(*lines, code=0, errors=""):
    """A command that prints these objects, whatever it is asked."""
    text = "\n".join(json.dumps(line) for line in lines)
    program = f"import sys; print({text!r}); sys.stderr.write({errors!r}); sys.exit({code})"
    return [sys.executable, "-c", program]


def one_pass(name, milliseconds, share):
    shape = {"tokens": 8, "vocab": 16, "depth": 4}
    return {"line": "pass", "pass": name, "milliseconds": milliseconds, "flop": 1e12,
            "teraflops": 1.5, "of_gemm": share, "peak_bytes": 1 << 30} | shape  # fmt: skip


def test_the_reference_is_shown_beside_its_own_gemm():
    card = {"line": "card", "name": "a card", "products": "cuBLAS dgemm", "seed": 5, "rounds": 3, "compiler": "NVRTC"}
    agreed = {"line": "agreement", "part": "lse", "worst": 1e-15, "allowed": 1e-12}
    passes = [one_pass("dgemm", [1.0], 1.0), one_pass("forward", [3.0, 1.0, 2.0], 0.8),
              one_pass("backward", [10.0, 8.0, 9.0], 0.625),
              one_pass("fused bf16, forward", [0.2], 9.0), one_pass("fused bf16, backward", [0.6], 9.0)]  # fmt: skip
    failed = {"line": "failed", "tokens": 1, "vocab": 2, "depth": 3, "why": "no memory"}
    found = reference.measure(3, 5, (8, 16, 4), printing(card, agreed, *passes, failed))
    beside = {"torch, eager": table.Outcome([1.0, 1.1, 0.9]), "CCE": table.Outcome(reason="gone")}
    lines = reference.lines(found, beside)
    text = "\n".join(lines)
    assert "a card; cuBLAS dgemm; seed 5" in lines[0] and "lse: off by 1.0e-15" in lines[1]
    assert "80.0 %" in text and "62.5 %" in text and "2.00 ms" in text and "1.00 GiB" in text
    assert "not measured: no memory" in text
    assert "in f64 take 11.00x the time of torch, eager" in lines[-2]
    assert "policy take 0.80x the time of torch, eager" in lines[-1] and "CCE" not in text
    assert not any("the time of" in line for line in reference.lines(found, {"CCE": beside["CCE"]}))


@pytest.mark.parametrize(
    "command, said",
    [
        (printing({"line": "absent", "why": "no CUDA device can be used: none"}), "no CUDA device can be used: none"),
        (printing(code=1, errors="warning\ndevice: dq_lse is not the CPU's\n"), "device: dq_lse is not the CPU's"),
        (printing(), "it ended with code 0"),
        (["/no/such/cargo"], "/no/such/cargo does not start"),
    ],
)
def test_a_reference_that_says_nothing_has_a_reason(command, said):
    with pytest.raises(timing.Unmeasured, match=said):
        reference.measure(1, 1, (1, 2, 3), command)


def test_what_is_not_json_is_passed_over():
    assert children.objects('Compiling x\n{"a": 1}\n[1]\n') == [{"a": 1}]
    assert math.isnan(children.objects('{"worst": NaN}')[0]["worst"])


def test_what_a_device_did_is_summed_up():
    found = activity.activity_of([
        ("Memcpy DtoH (Device -> Pinned)", 1000, 3000),
        ("MemcpyD2H", 4000, 5000),
        ("Memcpy HtoD (Pinned -> Device)", 0, 10),
        ("MemcpyD2D", 0, 10),
        ("Memset (Device)", 0, 10),
        ("fingerprint", 500, 900),
    ])  # fmt: skip
    assert (found.copies, found.span, found.kernels) == (3.0, 4.0, 0.4) and found.names == ("fingerprint",)
    lines = activity.lines([found] * 3, 2.0, 0.2)
    assert "66.7 %" in lines[0] and "50.0 %" in lines[1] and "50.0 %" in lines[2] and "fingerprint" in lines[3]
    assert "%" not in activity.lines([found], None, None)[0]


def test_a_build_without_a_kernel_for_the_checksum_says_so():
    lines = activity.lines([activity.Activity(3.0, 4.0)], 1.0, 1.0)
    assert "on the host" in lines[-1] and "not measured" in lines[-1]
    nothing = activity.lines([activity.Activity()], 1.0, 1.0)
    assert nothing[0].endswith("not measured: the profiler saw none of it") and len(nothing) == 3
    assert nothing[2].endswith("not measured: the profiler saw nothing of the device")
