"""The steps of two real torch jobs against each other: in other splits, shardings and names they are the same
step, and what is not the same is told with the run, the stage and the parameters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import free_port, run_ranks

import backtape

PROGRAM = Path(__file__).with_name("step_against_ranks.py")
REPLAY = os.environ.get("REPLAY") or Path(sys.executable).with_name("replay")

ONE_RANK = {
    "plain": {"steps": 2},
    "two-microbatches": {"microbatches": 2},
    "not-divided": {"microbatches": 2, "fault": "loss not divided"},
    "fused": {"model": "fused"},
    "kernels": {"model": "kernels"},
    "loss-scaled": {"scale": 1024.0, "microbatches": 2},
    "autocast": {"autocast": True},
    "other-seed": {"seed": 1},
    "other-weight": {"grow": 1.001},
    "other-lr": {"lr": 2e-3},
    "no-step": {"fault": "not recorded"},
}
TWO_RANKS = {
    "ddp": {"wrap": "ddp"},
    "ddp-two-microbatches": {"wrap": "ddp", "microbatches": 2},
    "fsdp2": {"wrap": "fsdp2"},
    "reduced-twice": {"wrap": "ddp", "fault": "reduced twice"},
    "ddp-three": {"wrap": "ddp", "steps": 3},
    "zero-three": {"wrap": "zero", "steps": 3},
    "zero-lr": {"wrap": "zero", "steps": 3, "lr": 2e-3},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    for world, jobs in ((1, ONE_RANK), (2, TWO_RANKS)):
        words = [f"{name}={json.dumps(options)}" for name, options in jobs.items()]
        run_ranks(PROGRAM, world, free_port(), directory, *words)
    return directory


class Compared:
    """The end of `replay diff A B`: its exit code, text and JSON."""

    def __init__(self, runs, one, other, mapping=None, compare="step"):
        place = lambda name: str(runs / name) if "@" in name else f"{runs / name}@0:0"  # noqa: E731
        command = [REPLAY, "diff", place(one), place(other), "--quiet", "--json", runs / "report.json"]
        command += ["--compare", compare] if compare else []
        if mapping is not None:
            (runs / "mapping").write_text(mapping)
            command += ["--map", runs / "mapping"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.code, self.text, self.errors = done.returncode, done.stdout, done.stderr
        written = runs / "report.json"
        self.json = json.loads(written.read_text()) if self.code in (0, 1, 3, 4) else {}
        self.step = (self.json.get("against") or {}).get("step") or {}
        self.said = " ".join(self.text.split())

    def __str__(self):
        return f"exit {self.code}\n{self.text}\n{self.errors}"

    def row(self, at):
        return next(row for row in self.step["stages"] if row["at"] == at)

    def entering(self):
        """Where differences come in: place, status, parameters."""
        return [(one["at"], one["status"], one["parameters"]) for one in self.step["groups"]]


SAME = [
    ("plain", "plain"),
    ("plain", "two-microbatches"),
    ("plain", "ddp"),
    ("plain", "ddp-two-microbatches"),
    ("two-microbatches", "fsdp2"),
    ("ddp", "fsdp2"),
    ("loss-scaled", "ddp"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_step_in_another_split_or_sharding_agrees(runs, one, other):
    found = Compared(runs, one, other)
    assert found.code == 0 and found.json["verdict"] == "agreed", str(found)
    assert found.row("before")["equal"] == 9 and found.row("grad")["differ"] == 0
    assert found.entering() == [] and found.step["pairs"] == 9
    assert "both runs take the same step of 9 parameters" in found.said
    assert found.row("grad")["largest"] <= found.row("grad")["floor"] < 1e-4
    # Other sums of the same rows round in another way.
    if one == "plain":
        assert (found.row("grad")["equal"] == 9) == (one == other)


def test_a_sharded_optimizer_takes_the_step_of_one_that_is_not(runs):
    """One rank alone has the state of a parameter, and counts its steps."""
    found = Compared(runs, "ddp-three@0:2", "zero-three@0:2")
    assert found.code == 0 and found.entering() == [], str(found)
    assert "both runs take the same step of 9 parameters" in found.said
    other = Compared(runs, "zero-three@0:0", "zero-lr@0:0")
    assert other.code == 4 and "lr 0.001 here and 0.002 there" in other.said, str(other)


def test_products_in_bf16_show_themselves_and_explain_what_they_bring(runs):
    found = Compared(runs, "plain", "autocast")
    assert found.code == 0 and found.entering() == [], str(found)
    assert 1e-3 < found.row("grad")["largest"] <= found.row("grad")["floor"] < 0.2


def test_the_run_that_reduces_twice_is_named_with_its_share_of_the_gap(runs):
    found = Compared(runs, "plain", "reduced-twice")
    assert found.code == 1, str(found)
    first = found.step["groups"][0]
    assert (first["at"], first["status"], first["parameters"]) == ("reduce", "other_is_wrong", ["out.weight"])
    assert first["factor"] == pytest.approx(0.5, rel=1e-5)
    assert "reduce-sum-for-mean" in first["cause"]
    assert "the other run is wrong at reduce: out.weight" in found.step["conclusion"][0]
    share = found.step["norm"]["shares"][0]
    assert (share["at"], share["run"], share["what"]) == ("reduce", "the other run", "out.weight")
    assert share["share"] == pytest.approx(1, abs=1e-3)
    assert sum(one["share"] for one in found.step["norm"]["shares"]) == pytest.approx(1, abs=1e-9)
    # The other way round it is this run.
    turned = Compared(runs, "reduced-twice", "plain")
    assert turned.entering()[0] == ("reduce", "this_is_wrong", ["out.weight"]), str(turned)
    assert "this run is wrong at reduce: out.weight" in turned.said


def test_a_loss_that_is_not_divided_is_told_at_the_gradients_with_the_sizes_that_its_factor_is(runs):
    found = Compared(runs, "not-divided", "plain")
    assert found.code == 4, str(found)
    (first, *_) = found.step["groups"]
    # The gradient of the key's bias is zero but for rounding: softmax does not see it.
    assert (first["at"], first["status"]) == ("grad", "differs") and first["what"] == "all 8 parameters but k.bias"
    assert first["factor"] == pytest.approx(2, rel=1e-5)
    assert any("microbatches" in reading for reading in first["readings"]), first
    assert "look at the forward, the backward, the data" in found.said
    assert found.step["norm"]["shares"][0]["at"] == "grad"


def test_other_weights_before_the_step_are_told_first(runs):
    found = Compared(runs, "plain", "other-weight")
    assert found.code == 4, str(found)
    assert found.entering()[0] == ("before", "differs", ["out.weight"])
    assert found.step["groups"][0]["factor"] == pytest.approx(1 / 1.001, rel=1e-6)
    assert "the runs begin the step with other weights: out.weight" in found.said
    # What follows from them is no difference of its own.
    assert {at for at, *_ in found.entering()} == {"before"}, str(found)
    seeds = Compared(runs, "plain", "other-seed")
    assert seeds.code == 4 and seeds.row("before")["differ"] == 7, str(seeds)


def test_another_learning_rate_is_a_setting(runs):
    found = Compared(runs, "plain", "other-lr")
    assert found.code == 4, str(found)
    (setting,) = found.step["settings"]
    assert setting == {
        "name": "lr", "this": "0.001", "other": "0.002", "what": "all 9 parameters", "at": "after",
    }  # fmt: skip
    assert {at for at, *_ in found.entering()} == {"after"}
    assert "lr 0.001 here and 0.002 there" in found.said


FUSED = """
qkv.weight = cat(q.weight, k.weight, v.weight; dim 0)   # the order of the projection
qkv.bias = cat(q.bias, k.bias, v.bias; dim 0)
"""


@pytest.mark.parametrize("mapping", [None, FUSED])
def test_a_fused_projection_is_compared_with_the_three_that_make_it(runs, mapping):
    found = Compared(runs, "fused", "plain", mapping)
    assert found.code == 0, str(found)
    assert found.step["pairs"] == 5 and not found.step["lacking"]
    how = "by the mapping" if mapping else "by their values before the step"
    assert f"qkv.weight = cat(q.weight, k.weight, v.weight; dim 0), {how}" in found.step["found"]
    assert found.row("state")["equal"] + found.row("state")["explained"] == 5


JOINED = {f"qkv.{kind}": f"cat(q.{kind}, k.{kind}, v.{kind}; dim 0)" for kind in ("weight", "bias")}


@pytest.mark.parametrize("how", ["file", "dict", "lines"])
def test_python_takes_a_mapping_as_a_file_a_dict_or_lines(runs, tmp_path, how):
    (tmp_path / "names").write_text(FUSED)
    given = {"file": tmp_path / "names", "dict": JOINED, "lines": FUSED.splitlines()}[how]
    report = backtape.replay(runs / "fused", step=0, compare=["step"], against=runs / "plain", map=given)
    step = report.json["against"]["step"]
    assert report.verdict == "agreed" and step["pairs"] == 5
    assert step["found"] == [f"{ours} = {theirs}, by the mapping" for ours, theirs in JOINED.items()]
    of_weight = [one for one in step["compared"] if one["parameter"] == "qkv.weight"]
    assert {one["other"] for one in of_weight} == {JOINED["qkv.weight"]}


@pytest.mark.parametrize(("given", "error", "why"), [
    ({"out.weight": "q.weight"}, RuntimeError, "line 1 of the mapping, .*has the shape"),
    ({"q.weight": ""}, ValueError, "map=: line 1 of the mapping, .*is no name"),
    (["# names", "q.weight"], ValueError, "map=: line 2 of the mapping, .*it has no ="),
    ("no such file", ValueError, "map='no such file' cannot be read: name a text file"),
    (["a = b\nc = d"], ValueError, "each entry is one line"),
    ([3], ValueError, "map= has 3: each entry is one line"),
])  # fmt: skip
def test_python_refuses_a_mapping_in_one_sentence(runs, given, error, why):
    with pytest.raises(error, match=why) as raised:
        backtape.replay(runs / "plain", step=0, compare=["step"], against=runs / "ddp", map=given)
    assert "\n" not in str(raised.value)


def test_a_mapping_needs_the_other_run(runs):
    with pytest.raises(ValueError, match="give the other run by against="):
        backtape.replay(runs / "plain", step=0, map=JOINED)


def test_a_fault_is_told_of_the_fused_parameter(runs):
    """The names of a pair are those of this run, in whatever way the other holds it."""
    found = Compared(runs, "plain", "fused", "cat(q.*, k.*, v.*; dim 0) = qkv.*")
    assert found.code == 0 and "(2 pairs), by the mapping" in found.said, str(found)


KERNELS = """
*.weight = dense_*.kernel.T
*.bias = dense_*.b
"""


@pytest.mark.parametrize("mapping", [None, "q.* = dense_q.*\n", KERNELS])
def test_transposed_parameters_of_other_names_are_found_and_agree(runs, mapping):
    if mapping == "q.* = dense_q.*\n":
        # No name of one run is one of the other in this way.
        found = Compared(runs, "plain", "kernels", mapping)
        assert found.code == 2 and "it fits no parameters that both runs have" in found.errors, str(found)
        return
    found = Compared(runs, "plain", "kernels", mapping)
    assert found.code == 0 and found.step["pairs"] == 9, str(found)
    if mapping is None:
        assert "out.weight = dense_out.kernel.T, by their values before the step" in found.step["found"]


def jax_step(runs, name, scale=1.0):
    """The step of `plain` in jax, written by hand, with kernels and names of jax; `scale` multiplies the
    gradient that the optimizer takes."""
    import jax
    import jax.numpy as jnp
    import torch

    import backtape.jax

    step = backtape.open(runs / "plain").step(0)
    of = lambda name: jnp.asarray(step.tensor(f"step.before:{name}"))  # noqa: E731
    dense = {key: {"kernel": of(f"{key}.weight").T, "bias": of(f"{key}.bias")} for key in "qkv"}
    norm = {"scale": of("norm.weight"), "bias": of("norm.bias")}
    params = {"attention": dense, "norm": norm, "head": {"kernel": of("out.weight").T}}
    draw = torch.Generator().manual_seed(100)
    x, y = (jnp.asarray(torch.randn(16, 3, width, generator=draw).numpy()) for width in (8, 5))

    def loss(params):
        q, k, v = (x @ params["attention"][key]["kernel"] + params["attention"][key]["bias"] for key in "qkv")
        out = x + jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v
        centred = out - out.mean(-1, keepdims=True)
        normed = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        out = normed * params["norm"]["scale"] + params["norm"]["bias"]
        return ((out @ params["head"]["kernel"] - y) ** 2).mean()

    grads = jax.grad(loss)(params)
    total = jnp.sqrt(sum((one**2).sum() for one in jax.tree.leaves(grads)))
    clipped = jax.tree.map(lambda one: one * (0.05 / (total + 1e-6)), grads)
    taken = jax.tree.map(lambda one: one * scale, clipped)
    mu, nu = (jax.tree.map(lambda one: (1 - b) * one**e, taken) for b, e in ((0.9, 1), (0.999, 2)))

    def changed(p, m, v):
        return -1e-3 * (m / 0.1 / (jnp.sqrt(v / (1 - 0.999)) + 1e-8) + 0.01 * p)

    updates = jax.tree.map(changed, params, mu, nu)
    zeros = jax.tree.map(jnp.zeros_like, params)
    with backtape.Recorder(runs / name, steps="0", strict=True) as recorder, recorder.step(0) as tape:
        backtape.jax.step_algebra(
            tape, params=params, new_params=jax.tree.map(jnp.add, params, updates), grads=grads,
            local_grads=[grads], clipped=clipped, updates=updates,
            opt_state={"mu": zeros, "nu": zeros, "count": 0},
            new_opt_state={"mu": mu, "nu": nu, "count": 1},
            norm=[{"value": float(total), "max_norm": 0.05, "epsilon": 1e-6}],
            optimizer={"name": "adamw", "lr": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
        )  # fmt: skip


def test_torch_and_jax_take_the_same_step_and_the_one_that_does_not_is_named(runs):
    jax_step(runs, "jax")
    found = Compared(runs, "plain", "jax")
    assert found.code == 0, str(found)
    assert found.step["pairs"] == 9 and not found.step["lacking"] and not found.step["settings"]
    same = found.step["found"]
    assert "k.weight = attention.k.kernel.T, by their values before the step" in same, same
    assert "norm.weight = norm.scale, by their values before the step" in same, same
    assert found.row("state")["equal"] + found.row("state")["explained"] == 9
    jax_step(runs, "jax-scaled", scale=2.0)
    wrong = Compared(runs, "jax-scaled", "plain")
    assert wrong.code == 1, str(wrong)
    entering = wrong.entering()
    assert {(at, status) for at, status, _ in entering} == {("state", "this_is_wrong")}, str(wrong)
    assert len({name for *_, parameters in entering for name in parameters}) == 9
    assert "this run is wrong at state" in wrong.step["conclusion"][0]
    assert "the other run is right at every stage that was judged" in wrong.step["conclusion"][0]


BAD = {
    "q.weigth = q.weight": "this run has no parameter q.weigth that no line before it took: it has",
    "q.weight = out.weight": "q.weight has the shape [8, 8] in this run, and out.weight has [5, 8] in the other",
    "q.weight": "it has no =",
    "q.weight = cat(q.weight, out.weight; dim 1)": "out.weight has the shape [5, 8], which does not fit [8, 8]",
    "norm.weight = norm.weight.T": "is of a tensor of 1 dimensions",
}


@pytest.mark.parametrize("line", BAD)
def test_a_mapping_that_does_not_fit_is_refused_in_one_sentence(runs, line):
    found = Compared(runs, "plain", "ddp", f"\n{line}\n")
    assert found.code == 2 and "line 2 of the mapping" in found.errors and BAD[line] in found.errors, str(found)


def test_parameters_of_one_run_alone_are_one_sentence_and_the_rest_is_judged(runs):
    found = Compared(runs, "plain", "ddp", "q.weight = k.weight\n")
    assert found.row("before")["differ"] == 1 and found.step["pairs"] == 8, str(found)
    assert any("k.weight of this run: nothing in the other run" in one for one in found.step["lacking"])


def test_a_run_that_recorded_no_step_and_another_step_are_told(runs):
    found = Compared(runs, "plain", "no-step")
    assert found.code == 3 and "other run: no part of the step was recorded" in found.said, str(found)
    everything = Compared(runs, "plain", "no-step", compare=None)
    assert "the step: only this run recorded it" in everything.said, str(everything)
    later = Compared(runs, "plain", "plain@0:1")
    assert "step 0 of this run is compared with step 1 of the other" in later.said, str(later)
    assert later.code == 4 and "step of the optimizer before 0 here and 1 there" in later.said, str(later)
    missing = Compared(runs, "plain", "ddp@0:7")
    assert missing.code == 2 and "7" in missing.errors, str(missing)
