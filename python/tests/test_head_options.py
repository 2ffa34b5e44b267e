"""Random option sets of the loss head, computed and differentiated by JAX, recorded and replayed.

Goal: the replay's f64 reference and its rounding model agree with an independent oracle for every
option, and disagree with planted errors at the stage where they enter. Method: heads.py, through
recorder, dump and `backtape.replay`.

BACKTAPE_SEED draws other cases, BACKTAPE_CASES says how many.
"""

import os
from collections import defaultdict
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from draws import Case, Pool, add_policy_inputs, draw
from heads import Options, denominators, gradients, parts, shape_of

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 20261121))
CASES = int(os.environ.get("BACKTAPE_CASES", 80))

# Unit roundoff 1.1e-16 over sums of at most 90 terms, with room for cancellation between them.
F64_ERROR = 1e-12


def taken(rng, chance, names):
    return {name for name in names if rng.random() < chance}


def inputs_of(case, data):
    """What is differentiated."""
    starts = ("q", "k", "logits", "logprobs", "bias")
    held = case.shared | data
    x = {name: jnp.asarray(held[name]) for name in starts if name in held}
    shape = shape_of(data)
    wide = jnp.promote_types(case.dtype, jnp.float32)
    if "logprobs" not in x:
        vocab = case.shared["k"].shape if "q" in x else data["logits"].shape[-1:]
        dv = case.options.get("k_layout") == "dv"
        x["at_logits"] = jnp.zeros((*shape, vocab[1 if "q" in x and dv else 0]), wide)
    if case.options["loss"] == "grpo":
        x["at_logprobs"] = jnp.zeros(shape, wide)
    return x


GRADIENTS = {"q": "dq", "k": "dk", "bias": "dbias", "at_logits": "dlogits", "at_logprobs": "dlogprobs"}

PARTS = {"dq_lse", "dq_label", "dk_lse", "dk_label"}


def compute(case, jit=False, **how):
    """Everything that a job could record, a dict for each microbatch."""
    o = Options(case.options)
    found = []
    for data, denominator in zip(case.microbatches, denominators(case.microbatches, o)):
        run = lambda x: gradients(x, data, o, denominator, **how)
        seen, grads = (jax.jit(run) if jit else run)(inputs_of(case, data))
        named = {GRADIENTS[name]: value for name, value in grads.items() if name in GRADIENTS}
        found.append({name: np.asarray(value) for name, value in (seen | named).items()})
    return found


def logprobs(case):
    """Of the labels, before there are advantages to make a loss of."""
    plain = {**case.options, "loss": "xent_logits", "denominator": 1.0, "reduction": "sum"}
    held = compute(replace(case, options=plain)) if "logprobs" not in case.microbatches[0] else []
    return [np.asarray(mb["logprobs"], np.float64) for mb in held or case.microbatches]


def draw_case(seed, index, dtype=np.float64, loss=None):
    """Case `index` of a seed, and what decides which tensors it records."""
    rng = np.random.default_rng([seed, index])
    case = draw(rng, Pool(np.random.default_rng(seed)), dtype, loss)
    if case.options["loss"] == "grpo":
        add_policy_inputs(rng, case, logprobs(case))
    return case, rng


def choose(rng, case):
    """The outputs to record: all that there are, now and then some left out."""
    o = Options(case.options)
    names = {"loss", "dlogprobs"} if o.loss == "grpo" else {"loss"}
    if "logprobs" not in case.microbatches[0]:
        names |= {"lse", "label_logits", "logprobs", "dlogits"}
    if "k" in case.shared:
        names |= {"logits", "dq", "dk"} | ({"dbias"} if "bias" in case.shared else set())
        if o.loss == "softmax_xent" and rng.random() < 0.3:
            names |= PARTS
    return names if rng.random() < 0.3 else taken(rng, 0.75, sorted(names)) | {"loss"}


def padded(z, vocab):
    """Logits as wide as k: what stands in the padding is the job's own business."""
    filler = np.full((*z.shape[:-1], vocab - z.shape[-1]), 7.0, z.dtype)
    return np.concatenate([z, filler], -1)


def record(tape, case, outputs, chosen, rng):
    """Records a case; the stages that the replay must then have judged."""
    o = Options(case.options)
    tape.head(**case.options)
    for name, array in case.shared.items():
        tape.record(name, array)
    several, addends = len(case.microbatches) > 1, []
    for index, (data, found) in enumerate(zip(case.microbatches, outputs)):
        microbatch = index if several or rng.random() < 0.5 else None
        for name, array in data.items():
            tape.record(name, array, microbatch=microbatch)
        found = dict(found)
        if PARTS & chosen:
            x, denominator = inputs_of(case, data), denominators(case.microbatches, o)[index]
            found |= {name: np.asarray(a) for name, a in parts(x, data, o, denominator).items()}
            # Where both parts are recorded the sum is judged by them, so it must be theirs;
            # where one is not, dlogits are nearer, and the gradient must come from them.
            for name in ("dq", "dk"):
                if {f"{name}_lse", f"{name}_label"} <= chosen:
                    found[name] = found[f"{name}_lse"] + found[f"{name}_label"]
        if "every_logprob" in found and o.loss != "grpo" and rng.random() < 0.2:
            found["logprobs"] = padded(found["every_logprob"], found["dlogits"].shape[-1])
        if "logits" in chosen:
            found["logits"] = padded(found["logits"], found["dlogits"].shape[-1])
        for name in sorted(chosen):
            tape.record(name, found[name], microbatch=microbatch)
        addends.append(found.get("dk"))
    stages = set(chosen)
    if several and "dk" in chosen:
        stages.add(record_sum(tape, o, addends, rng))
    return stages


def record_sum(tape, o, addends, rng):
    """dk over microbatches, before the reduction over the one rank or after it."""
    wide = [dk.astype(np.promote_types(dk.dtype, np.float32)) for dk in addends]
    total = sum(wide) / (len(wide) if o.microbatch_reduction == "mean" else 1)
    when, stage = [("post_reduce", "reduce"), ("pre_reduce", "accumulate")][rng.integers(2)]
    tape.record("dk", total.astype(wide[0].dtype), when=when)
    return stage


def statuses(report, names):
    """Status of every stage that is not what it should be, in words."""
    found = {stage.name: stage for stage in report.stages}
    wrong = [found[name] for name in sorted(names) if found[name].status != "pass"]
    return [f"{stage.name}: {stage.status} {stage.reason}" for stage in wrong]


class Run:
    """One recorder, one step for each case."""

    def __init__(self, path, seed, count):
        self.path, self.seed, self.held = path, seed, []
        self.errors = defaultdict(float)
        self.recorder = backtape.Recorder(path, steps=f"0-{count - 1}", strict=True)

    def add(self, case, outputs, chosen, rng):
        with self.recorder.step(len(self.held)) as tape:
            self.held.append((case, record(tape, case, outputs, chosen, rng)))

    def replayed(self):
        """Every case with its stages and its report."""
        self.recorder.close()
        for index, (case, stages) in enumerate(self.held):
            yield index, case, stages, backtape.replay(self.path, step=index)

    def judge(self, most=np.inf):
        """Asserts that every case agrees, every recorded stage judged."""
        wrong = []
        for index, case, stages, report in self.replayed():
            found = statuses(report, stages)
            for stage in report.stages:
                if getattr(stage, "error", None) is not None:
                    # Unlike max, numpy keeps a NaN.
                    self.errors[stage.name] = np.maximum(self.errors[stage.name], stage.error)
                    if not stage.error < most:
                        found.append(f"{stage.name}: error {stage.error} of at most {most}")
            if report.verdict != "agreed" or found:
                wrong.append(f"BACKTAPE_SEED={self.seed} case {index}: {found}\n{case}\n{report}")
        print(f"\n{len(self.held)} cases; largest errors:")
        print("  ".join(f"{name} {error:.1e}" for name, error in self.errors.items()))
        assert not wrong, f"{len(wrong)} of {len(self.held)} cases:\n" + "\n".join(wrong[:5])


def test_the_f64_reference_agrees_with_jax_for_every_option(tmp_path):
    run = Run(tmp_path / "run", SEED, CASES)
    with jax.enable_x64(True):
        for index in range(CASES):
            case, rng = draw_case(SEED, index)
            run.add(case, compute(case), choose(rng, case), rng)
    run.judge(F64_ERROR)


def test_jobs_in_bf16_and_f32_agree(tmp_path):
    cases = max(CASES * 3 // 10, 1)
    run = Run(tmp_path / "run", SEED, cases)
    for index in range(cases):
        dtype = [ml_dtypes.bfloat16, np.float32][index % 2]
        case, rng = draw_case(SEED, 10_000 + index, dtype)
        jit, narrow = rng.random() < 0.2, rng.random() < 0.3
        outputs = compute(case, jit=bool(jit), narrow=bool(narrow))
        # Where a ratio lies next to its bound only dlogprobs says on which side it fell.
        chosen = choose(rng, case) | ({"dlogprobs"} if case.options["loss"] == "grpo" else set())
        run.add(case, outputs, chosen, rng)
    run.judge()


def other(case, **options):
    """The same arrays under other options."""
    return replace(case, options=case.options | options)


BASE = {
    "loss": "softmax_xent", "path": "plain", "valid_vocab": 40, "mask_value": -3.5, "z_loss": 0.01,
    "softcap": 5.0, "temperature": 0.5, "label_smoothing": 0.1, "ignore_label": -100,
    # Undeclared, bf16 inputs could hide the 0.25 % between the formulas of smoothing.
    "dtypes": {"logits": "f32"},
}  # fmt: skip
FORWARD = ["lse", "label_logits", "loss"]
BACKWARD = ["dlogits", "dq", "dk", "dbias"]


def no_z_loss(case):
    return {}, compute(other(case, z_loss=0.0))


def no_temperature(case):
    """The gradient of z1 handed on as that of z0."""
    (found,) = compute(case)
    return {}, [{name: found[name] * case.options["temperature"] for name in BACKWARD}]


def no_softcap_derivative(case):
    return {}, compute(case, twist="no softcap derivative")


def bias_twice(case):
    return compute(replace(case, shared=case.shared | {"bias": 2 * case.shared["bias"]})), {}


def under(**options):
    """Forward and backward of a job that does something else than it declares."""

    def wrong(case):
        found = compute(other(case, **options))
        return found, found

    return wrong


# What goes wrong, and the first of the recorded stages that it changes.
PLANTED = {
    "z-loss left out of the gradient": (no_z_loss, "dlogits"),
    "temperature left out of the gradient": (no_temperature, "dlogits"),
    "derivative of the softcap left out": (no_softcap_derivative, "dlogits"),
    "smoothing by the other formula": (under(smoothing_formula="megatron"), "loss"),
    "padding not masked": (under(valid_vocab=None, mask_value=None), "lse"),
    "padding masked by another value": (under(mask_value=3.0), "lse"),
    "divided by all tokens": (under(denominator="all"), "loss"),
    "labels taken for shifted": (under(labels_shifted=True), "label_logits"),
    "bias added twice": (bias_twice, "lse"),
    "cotangent dropped": (under(cotangent=1.0), "dlogits"),
}


def planted_case(dtype):
    rng = np.random.default_rng(SEED)
    k, o = rng.standard_normal((47, 6)), {"cotangent": 0.5, "labels_shifted": False}
    labels = rng.integers(0, 40, (3, 7))
    labels[1, 2:4] = -100
    data = {"labels": labels, "q": rng.standard_normal((3, 7, 6)).astype(dtype)}
    shared = {"k": k.astype(dtype), "bias": rng.standard_normal(47).astype(np.float32)}
    declared = BASE | o | ({"dtypes": {}} if dtype is np.float64 else {})
    return Case(declared, dtype, shared, [data])


@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16], ids=["f64", "bf16"])
def test_planted_errors_are_found_where_they_enter(tmp_path, dtype):
    run = backtape.Recorder(tmp_path / "run", steps=f"0-{len(PLANTED)}", strict=True)
    with jax.enable_x64(dtype is np.float64):
        case = planted_case(dtype)
        (right,) = compute(case)
        for step, (plant, _) in enumerate([*PLANTED.values(), (lambda case: ({}, {}), None)]):
            forward, backward = plant(case)
            found = dict(right)
            found |= {name: forward[0][name] for name in FORWARD if forward}
            found |= {name: backward[0][name] for name in BACKWARD if backward}
            with run.step(step) as tape:
                tape.head(**case.options)
                for name, array in (case.shared | case.microbatches[0]).items():
                    tape.record(name, array)
                for name in FORWARD + BACKWARD:
                    tape.record(name, found[name])
    run.close()
    wrong = []
    for step, (what, (_, stage)) in enumerate(PLANTED.items()):
        report = backtape.replay(tmp_path / "run", step=step)
        first = report.first_divergence and report.first_divergence.stage
        # Another formula may be another declaration's, and is told as that.
        if report.verdict not in ("diverged", "misdeclared") or first != stage:
            wrong.append(f"{what}: {report.verdict} at {first}, not at {stage}\n{report}")
    assert not wrong, f"BACKTAPE_SEED={SEED}\n" + "\n".join(wrong)
    clean = backtape.replay(tmp_path / "run", step=len(PLANTED))
    assert clean.verdict == "agreed", str(clean)
