"""Nothing of backtape reaches the job, unless strict=True asks for it."""

import logging
import os
import socket
import subprocess
import sys
import textwrap
import time
import timeit

import numpy as np
import pytest
import reading

import backtape


@pytest.fixture
def told(caplog):
    """The log lines of backtape."""
    caplog.set_level(logging.INFO, "backtape")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "backtape"]


class Untouchable:
    """An array-like that fails in whatever way it is touched."""

    def __array__(self, *_args, **_kwargs):
        raise RuntimeError("the array is gone")

    def __str__(self):
        raise RuntimeError("no text either")


BAD_CALLS = {
    "an object array": lambda tape: tape.record("x", np.array([object()])),
    "a gone array": lambda tape: tape.record("x", Untouchable()),
    "a ragged list": lambda tape: tape.record("x", [[1], [2, 3]]),
    "an unknown option": lambda tape: tape.record("x", 1.0, microbach=1),
    "an array that was forgotten": lambda tape: tape.record("x"),
    "an option without its name": lambda tape: tape.record("x", 1.0, 0),
    "a head option without its name": lambda tape: tape.head("softmax_xent"),
    "a wrong moment": lambda tape: tape.record("x", 1.0, when="before"),
    "a wrong reduction": lambda tape: tape.record("x", 1.0, partial="max"),
    "an unknown role": lambda tape: tape.record("x", 1.0, role="query"),
    "a negative microbatch": lambda tape: tape.record("x", 1.0, microbatch=-1),
    "a name that is a path": lambda tape: tape.record("../x", 1.0),
    "a name that is none": lambda tape: tape.record(None, 1.0),
    "a name without text": lambda tape: tape.record(Untouchable(), 1.0),
    "half a box": lambda tape: tape.record("x", np.ones(3), offsets=(0,)),
    "a box outside": lambda tape: tape.record("x", np.ones(3), offsets=(2,), global_shape=(4,)),
    "a misspelt head option": lambda tape: tape.head(redaction="mean"),
    "a wrong head value": lambda tape: tape.head(reduction="average"),
    "an unknown denominator": lambda tape: tape.head(denominator="tokens"),
    "a path that nothing describes": lambda tape: tape.head(path="flash"),
    "options that cannot both hold": lambda tape: tape.head(reduction="sum", denominator="all"),
    "a head that is no number": lambda tape: tape.head(z_loss=float("nan")),
    "a head with an object": lambda tape: tape.head(softcap=object()),
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_a_bad_call_is_logged_counted_and_survived(tmp_path, told, call):
    with backtape.Recorder(tmp_path / "run") as recorder, recorder.step(0) as tape:
        call(tape)
        tape.record("good", 1.0)
    assert reading.only(tmp_path / "run", "good")
    assert len(reading.omissions(tmp_path / "run")) == 1
    first, *_ = told()
    assert first.startswith("[backtape][H") and "][R0] " in first and "\n" not in first


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_a_bad_call_raises_recorder_error_in_strict_mode(tmp_path, call):
    recorder = backtape.Recorder(tmp_path / "run", strict=True)
    with pytest.raises(backtape.RecorderError), recorder.step(0) as tape:
        call(tape)
    recorder.close()


def test_an_error_names_the_option_and_what_it_accepts(tmp_path):
    recorder = backtape.Recorder(tmp_path / "run", strict=True)
    with recorder.step(0) as tape:
        for call, words in (
            (lambda: tape.head(reduction="average"), ["reduction='average'", 'choose one of "mean", "sum", "none"']),
            (lambda: tape.head(loss="grpo", grpo={"beta": 0.1}), ["grpo.beta", "kl_beta", "clip_low"]),
            (lambda: tape.head(loss="grpo", grpo={"kl": "k4"}), ["grpo.kl='k4'", 'choose one of "k3", "k1", "k2"']),
            (lambda: tape.head(loss="grpo", grpo={"dual_clip": 1.0}), ["grpo.dual_clip=1.0", "above 1"]),
            (lambda: tape.head(tiles={"token": 4}), ['the key "token" is not known (did you mean tokens?)']),
            (lambda: tape.head(scope={"rank": "one"}), ["did you mean ranks?", "sequences"]),
            (lambda: tape.head(scope={"sequences": "one"}), ['the word "one" is not known', "all, each"]),
            (lambda: tape.head(valid_vocab=0), ["valid_vocab=0", "at least 1"]),
            (lambda: tape.head(softcap="30"), ["softcap='30'", "float | None is needed"]),
            (lambda: tape.head(scope={"ranks": "each"}), ['ranks: "all", "one" or a list of axes is needed']),
            (lambda: tape.head(redaction="mean"), ["redaction", "did you mean reduction?"]),
            (lambda: tape.head(label_smooth=0.1), ["did you mean label_smoothing?"]),
            (lambda: tape.head(colour="red"), ["colour", "there are ", "softcap", "z_loss"]),
            (lambda: tape.head(denominator="tokens"), ["tokens", '"valid"', '"all"', '"weights"']),
            (lambda: tape.head(path="flash"), ["path=flash", "plain, fused, chunked"]),
            (lambda: tape.head(dtypes={"logit": "f32"}), ["did you mean logits?"]),
            (lambda: tape.head(dtypes={"logits": "float"}), ["{logits: float}", "bf16"]),
            (lambda: tape.record("x", 1.0, when="before"), ["when=", "before_op"]),
            (lambda: tape.record("x", 1.0, role="query"), ["query", "label_logits"]),
        ):
            with pytest.raises(backtape.RecorderError) as raised:
                call()
            assert all(word in str(raised.value) for word in words), str(raised.value)
    recorder.close()


def test_a_path_of_the_jobs_own_needs_its_policy(tmp_path):
    recorder = backtape.Recorder(tmp_path / "run", strict=True)
    with recorder.step(0) as tape:
        tape.head(path="flash", policy={"base": "fused"})
    recorder.close()


def test_a_replay_says_that_the_declaration_was_refused_and_why(tmp_path):
    with backtape.Recorder(tmp_path / "run") as recorder, recorder.step(0) as tape:
        tape.head(denominator="tokens")
        tape.record("q", np.ones((2, 2), np.float32), microbatch=0)
    with pytest.raises(RuntimeError) as raised:
        backtape.replay(tmp_path / "run", step=0)
    said = str(raised.value)
    assert "was refused while it ran" in said and '"tokens" is none: choose "valid"' in said


def test_the_same_kind_of_fault_is_logged_once_and_counted(tmp_path, told):
    with backtape.Recorder(tmp_path / "run") as recorder, recorder.step(0) as tape:
        for index in range(10):
            tape.record(f"x{index}", np.array([object()]))
    assert len(reading.omissions(tmp_path / "run")) == 10
    assert sum("record x" in line for line in told()) == 1
    assert any("9 more" in line for line in told())


@pytest.mark.parametrize("strict", [False, True])
def test_an_exception_of_the_job_passes_unchanged(tmp_path, strict):
    recorder = backtape.Recorder(tmp_path / "run", strict=strict)
    mine = KeyError("mine")
    with pytest.raises(KeyError) as raised, recorder.step(0) as tape:
        tape.record("x", 1.0)
        raise mine
    assert raised.value is mine and mine.__cause__ is None
    recorder.close()
    assert reading.only(tmp_path / "run", "x")
    ((tensor, reason),) = reading.omissions(tmp_path / "run")
    assert tensor == "*" and "KeyError" in reason


def test_a_directory_that_cannot_be_written_costs_the_dump_not_the_job(tmp_path, told):
    (tmp_path / "file").write_text("in the way")
    options = {"join_deadline_s": 1.0, "step_deadline_s": 1.0}
    with backtape.Recorder(tmp_path / "file" / "run", **options) as recorder:
        for step in range(3):
            with recorder.step(step) as tape:
                tape.record("x", 1.0)
    assert told() and all(line.startswith("[backtape][H") for line in told())


def test_wrong_settings_leave_an_inactive_recorder(tmp_path, told):
    for wrong in (
        {"steps": "first"}, {"rank": 4}, {"rank": "zero"}, {"transport": "pigeon"}, {"mesh": 5},
        {"call_cap_s": -1.0}, {"colour": "red"}, {"run": "../../etc"}, {"attempt": -1},
    ):  # fmt: skip
        recorder = backtape.Recorder(tmp_path / "run", **wrong)
        assert not recorder.active, wrong
        with recorder.step(0) as tape:
            assert not tape.active
            tape.head(nonsense=1)
            tape.record("x", 1.0)
        assert recorder.close() is None
        with pytest.raises(backtape.RecorderError):
            backtape.Recorder(tmp_path / "run", strict=True, **wrong)
    assert told()


def test_a_step_that_is_no_number_or_comes_twice_is_inactive(tmp_path, told):
    with backtape.Recorder(tmp_path / "run") as recorder:
        for step in ("zero", None, -1, 0, 0):
            with recorder.step(step) as tape:
                tape.record("x", 1.0)
    assert reading.only(tmp_path / "run", "x")


def test_a_tape_that_is_used_after_its_step_is_inactive(tmp_path):
    with backtape.Recorder(tmp_path / "run", strict=True) as recorder:
        with recorder.step(0) as tape:
            tape.record("x", 1.0)
        assert not tape.active
        tape.record("y", 1.0)
    assert [entry.record["tensor"] for entry in reading.entries(tmp_path / "run")] == ["x"]


def run_python(program, *arguments):
    program = textwrap.dedent(program)
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_job_that_never_closes_is_closed_at_exit(tmp_path):
    done = run_python(
        """
        import sys, numpy, backtape
        recorder = backtape.Recorder(sys.argv[1])
        with recorder.step(0) as tape:
            tape.record("x", numpy.ones((1000, 1000)))
        """,
        tmp_path / "run",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert reading.only(tmp_path / "run", "x")


def test_a_forked_child_neither_records_nor_hangs(tmp_path):
    done = run_python(
        """
        import os, sys, backtape
        recorder = backtape.Recorder(sys.argv[1])
        child = os.fork()
        with recorder.step(0) as tape:
            tape.record("x", 1.0 if child else 2.0)
        if child:
            assert os.waitpid(child, 0)[1] == 0
        """,
        tmp_path / "run",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert reading.only(tmp_path / "run", "x").array(np.float64) == 1.0


def test_importing_backtape_imports_no_framework():
    done = run_python("import backtape, sys; print({'jax', 'torch'} & sys.modules.keys())")
    assert done.stdout == "set()\n", done.stderr


def test_an_inactive_recorder_costs_next_to_nothing():
    recorder = backtape.Recorder.from_env()
    array = np.ones(3)

    def step():
        with recorder.step(7) as tape:
            tape.record("x", array, microbatch=0)

    # A bound for a loaded machine; python/benches/inactive.py measures.
    assert not recorder.active
    assert min(timeit.repeat(step, number=1000, repeat=5)) / 1000 < 20e-6


def test_no_variable_of_this_process_made_these_tests_record():
    assert not any(name.startswith("BACKTAPE_") for name in os.environ)


# The shards find no room, the journal's line goes into a page that it has, and the manifest finds
# none again.
FULL = """
import os, sys, time
import numpy as np
import backtape

store = sys.argv[1]
recorder = backtape.Recorder(os.path.join(store, "run"), steps="0-1", close_patience_s=2.0)
while recorder._native.summary().attempt is None:
    pass
with open(os.path.join(store, "filler"), "wb", buffering=0) as filler:
    for size in (1 << 16, 1):
        try:
            while filler.write(b"x" * size):
                pass
        except OSError as full:
            assert full.errno == 28, full
for step in range(2):
    with recorder.step(step) as tape:
        tape.record("x", np.ones(1 << 20, np.float32))
begin = time.monotonic()
summary = recorder.close()
print("closed after", time.monotonic() - begin)
print("partial", list(summary.steps_partial), "committed", list(summary.steps_committed))
print("\\n".join(summary.faults))
"""


def test_a_full_disk_costs_the_dump_and_a_few_seconds(tmp_path):
    """Goal: close() waits for no disk that is full, and says so. Method: a small tmpfs in a mount
    namespace of its own, filled to the last byte."""
    store = tmp_path / "store"
    store.mkdir()
    inside = f"mount -t tmpfs -o size=2m tmpfs {store} && exec {sys.executable} - {store}"
    space = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "-r"]
    if subprocess.run([*space, "sh", "-c", inside.split("&&")[0]], capture_output=True).returncode:
        pytest.skip("no mount namespace here")
    command = [*space, "sh", "-c", inside]
    ended = subprocess.run(command, input=FULL, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    closed, steps, faults = ended.stdout.split("\n", 2)
    assert float(closed.split()[-1]) < 8, ended.stdout
    assert steps == "partial [0, 1] committed []", ended.stdout
    assert "No space left on device" in faults and "Traceback" not in ended.stderr, ended.stdout
    assert "step 0 of rank 0 stays partial" in faults and "manifest.json" in faults, faults


def test_a_coordinator_that_is_gone_is_said_while_the_job_runs_and_when_it_ends(tmp_path, told):
    # Nobody listens there: the port was free a moment ago.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "127.0.0.1:%d" % free.getsockname()[1]
    recorder = backtape.Recorder(
        tmp_path / "run", coordinator=address, steps="0-1", close_patience_s=2.0
    )
    with recorder.step(0) as tape:
        tape.record("x", 1.0)
    begin = time.monotonic()
    while recorder._native.trouble() is None:
        assert time.monotonic() - begin < 30
        time.sleep(0.1)
    with recorder.step(1) as tape:
        tape.record("x", 1.0)
    assert any("the coordinator has taken nothing for" in line for line in told())
    begin = time.monotonic()
    summary = recorder.close()
    assert time.monotonic() - begin < 10
    assert list(summary.steps_partial) == [0, 1]
    assert address in summary.faults[0] and "refused" in summary.faults[0], summary.faults
