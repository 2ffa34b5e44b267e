"""A sample of each parameter, and a choice of parameters: what is recorded, and what a replay says."""

import json
import math

import numpy as np
import pytest
import reading
import torch
import torch.nn as nn
from pathlib import Path
from processes import free_port, run_ranks
from torch.nn.utils import clip_grad_norm_

import backtape
import backtape.torch
from backtape.sampling import Sampling

PROGRAM = Path(__file__).with_name("sample_ranks.py")
ELEMENTS, SEED = 200, 3


def regions_of(name, shape):
    """The regions of a parameter, the whole of one that is small."""
    regions = Sampling(ELEMENTS, SEED).regions(name, shape)
    return regions or (tuple((0, size) for size in shape),)


def index(region):
    return tuple(slice(low, high) for low, high in region)


class Model(nn.Module):
    """An embedding of which a batch reaches a few rows, and two layers; the biases are small."""

    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.inner = nn.Linear(width, 40)
        self.outer = nn.Linear(40, 30)

    def forward(self, tokens):
        return self.outer(torch.tanh(self.inner(self.embed(tokens))))


def trained(directory, steps=3, change=None, groups=None, **options):
    """Some steps of one process, of which the last is recorded; the model and its optimizer."""
    torch.manual_seed(0)
    module = Model()
    decayed = [one for one in module.parameters() if one.ndim > 1]
    others = [one for one in module.parameters() if one.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "name": "matrices"}, {"params": others, "weight_decay": 0.0}], lr=0.01
    )
    draw = torch.Generator().manual_seed(1)
    with backtape.Recorder(dir=directory, strict=True, steps=str(steps - 1)) as recorder:
        for step in range(steps):
            with recorder.step(step) as tape:
                backtape.torch.step_algebra(tape, module, optimizer, groups=groups, **options)
                for _ in range(2):
                    module(torch.randint(50, (16,), generator=draw)).square().mean().backward()
                if change is not None and tape.active:
                    change(module, optimizer)
                clip_grad_norm_(module.parameters(), 0.01)
                optimizer.step()
            optimizer.zero_grad()
    return module, optimizer


def declared(directory, step=2, rank=0):
    return json.loads(bytes(backtape.open(directory).step(step).tensor(f"step.declared:{rank}")))


def replayed(directory, step=2):
    report = backtape.replay(directory, step=step, compare=["step"])
    return report, report.json["algebra"]


def recorded_names(directory, step=2):
    keys = backtape.open(directory).step(step).keys()
    return {key[0].partition(":")[2] for key in keys if not key[0].startswith("step.declared")}


def shards_of(directory, step=2):
    """Box and bytes of each shard, by tensor, microbatch and rank."""
    found = {}
    for entry in reading.entries(directory, step):
        record = entry.record
        key = record["tensor"], record["microbatch"], record["rank"]
        region = tuple(map(tuple, record["box"]))
        found.setdefault(key, {})[region] = entry.data
    return found


def test_blocks_lie_in_the_parameter_share_no_element_and_depend_on_name_shape_and_seed_alone():
    draw = np.random.default_rng(5)
    for _ in range(300):
        shape = tuple(draw.integers(1, 40, draw.integers(1, 5)).tolist())
        wanted = int(draw.integers(1, 3000))
        regions = Sampling(wanted, 7).regions("layers.0.weight", shape)
        if math.prod(shape) <= wanted:
            assert regions is None
            continue
        seen = np.zeros(shape, int)
        for region in regions:
            seen[index(region)] += 1
        assert seen.max() == 1 and 0 < seen.sum() <= wanted, (shape, wanted, regions)
        assert regions == Sampling(wanted, 7).regions("layers.0.weight", shape)
    long = (4096, 4096)
    assert Sampling(4096, 0).regions("a", long) != Sampling(4096, 0).regions("b", long)
    assert Sampling(4096, 0).regions("a", long) != Sampling(4096, 1).regions("a", long)
    share = Sampling(0.01, 0).regions("a", long)
    assert sum(math.prod(high - low for low, high in region) for region in share) <= 0.01 * 4096**2 + 1


def test_a_sampled_step_holds_the_blocks_bit_for_bit_and_all_of_what_is_small(tmp_path):
    whole, _ = trained(tmp_path / "whole")
    sampled, _ = trained(tmp_path / "sampled", sample=ELEMENTS, sample_seed=SEED)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), sampled.parameters()))
    shapes = {name: tuple(one.shape) for name, one in whole.named_parameters()}
    told = declared(tmp_path / "sampled")["sampled"]
    assert (told["sample"], told["seed"]) == (ELEMENTS, SEED)
    assert sorted(told["parameters"]) == ["embed.weight", "inner.weight", "outer.weight"]
    full, some = shards_of(tmp_path / "whole"), shards_of(tmp_path / "sampled")
    assert full.keys() == some.keys()
    for (tensor, *_), shards in some.items():
        name = tensor.partition(":")[2]
        if tensor.startswith("step.declared"):
            continue
        regions = regions_of(name, shapes[name])
        assert sorted(shards) == sorted(regions)
        ((_, data),) = full[(tensor, *_)].items()
        values = np.frombuffer(data, np.float32).reshape(shapes[name])
        for region, found in shards.items():
            assert found == np.ascontiguousarray(values[index(region)]).tobytes(), (tensor, region)


def test_a_right_step_agrees_and_the_report_says_what_a_sample_does_not_see(tmp_path):
    trained(tmp_path / "run", sample=ELEMENTS, sample_seed=SEED)
    report, algebra = replayed(tmp_path / "run")
    assert report.verdict == "agreed", str(report)
    stages = {stage["stage"]: stage for stage in algebra["stages"]}
    assert set(stages) == {"accumulate", "norm", "clip", "state", "update"}
    assert all(stage["agreed"] and not stage["unchecked"] for stage in stages.values()), str(report)
    sampled = algebra["sampled"]
    assert (sampled["parameters"], sampled["of"]) == (3, 50 * 24 + 24 * 40 + 40 * 30)
    assert 500 <= sampled["elements"] <= 3 * ELEMENTS
    assert "of 3 parameters; norms are judged over all elements" in " ".join(str(report).split())
    # What is not recorded is no gap of the dump.
    assert report.json["dump"]["proved"], str(report)


def thrice(module, _):
    module.inner.weight.grad.mul_(3)


def test_a_fault_in_a_sampled_parameter_is_named_at_its_stage(tmp_path):
    trained(tmp_path / "run", change=thrice, sample=ELEMENTS, sample_seed=SEED)
    report, algebra = replayed(tmp_path / "run")
    assert report.verdict == "diverged"
    (group,) = algebra["diverged"]
    assert group["stage"] == "accumulate" and group["parameters"] == ["inner.weight"], str(report)
    assert group["reading"]["cause"] == "gradient-scaled" and group["factor"] == pytest.approx(3, rel=1e-6)
    # The norm is judged over all elements, and says what it would have been.
    gap = algebra["norm"]
    assert gap["estimated"] and gap["captured"] == pytest.approx(gap["reported"], rel=1e-5)
    assert gap["shares"] == [["inner.weight", 1.0]]


def test_clipping_that_is_wrong_outside_of_the_blocks_is_seen_by_the_sums_of_squares(tmp_path):
    torch.manual_seed(0)
    module = Model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    taken = {region[0][0] for region in regions_of("inner.weight", (40, 24))}
    rows = [row for row in range(40) if row not in taken]
    with backtape.Recorder(dir=tmp_path / "run", strict=True, steps="0") as recorder:
        with recorder.step(0) as tape:
            backtape.torch.step_algebra(tape, module, optimizer, sample=ELEMENTS, sample_seed=SEED)
            module(torch.arange(50)).square().mean().backward()
            clip_grad_norm_(module.parameters(), 0.01)
            module.inner.weight.grad[rows[:3]] *= 3
            optimizer.step()
    report, algebra = replayed(tmp_path / "run", 0)
    (group,) = algebra["diverged"]
    assert (group["stage"], group["parameters"]) == ("clip", ["inner.weight"]), str(report)
    assert "in what was sampled of it nothing is wrong" in group["reason"]


def test_a_norm_of_sampled_gradients_is_judged_by_the_declared_sums_of_squares(tmp_path):
    torch.manual_seed(0)
    module = Model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    with backtape.Recorder(dir=tmp_path / "run", strict=True, steps="0") as recorder:
        with recorder.step(0) as tape:
            capture = backtape.torch.step_algebra(tape, module, optimizer, sample=ELEMENTS)
            module(torch.arange(50)).square().mean().backward()
            layers = [one.grad for name, one in module.named_parameters() if "outer" not in name]
            capture.norm(nn.utils.get_total_norm(layers).item())
            optimizer.step()
    report, algebra = replayed(tmp_path / "run", 0)
    group = next(group for group in algebra["diverged"] if group["stage"] == "norm")
    assert group["reading"]["cause"] == "norm-misses-group", str(report)
    assert "outer" in group["reading"]["words"]
    (norm, *_) = declared(tmp_path / "run", 0)["norms"]
    squares = declared(tmp_path / "run", 0)["squares"]
    for name, one in module.named_parameters():
        if name in squares:
            exact = one.grad.double().square().sum().item()
            assert squares[name]["reduced"] == pytest.approx(exact, rel=1e-12)
            assert squares[name]["held"] == [[[0, size] for size in one.shape]]
    assert norm["value"] is not None and sorted(squares) == ["embed.weight", "inner.weight", "outer.weight"]


def test_names_and_groups_choose_parameters_and_the_norm_of_all_is_still_judged(tmp_path):
    trained(tmp_path / "names", names=["inner.*", "outer.bias"])
    assert recorded_names(tmp_path / "names") == {"inner.weight", "inner.bias", "outer.bias"}
    trained(tmp_path / "group", groups="matrices")
    assert recorded_names(tmp_path / "group") == {"embed.weight", "inner.weight", "outer.weight"}
    trained(tmp_path / "both", groups=[1], names="inner.*", sample=ELEMENTS)
    assert recorded_names(tmp_path / "both") == {"inner.bias"}
    for run, left_out in (("names", 2), ("group", 2), ("both", 4)):
        report, algebra = replayed(tmp_path / run)
        assert report.verdict == "agreed", str(report)
        assert len(declared(tmp_path / run)["squares"]) == left_out
        (norm,) = [stage for stage in algebra["stages"] if stage["stage"] == "norm"]
        assert (norm["agreed"], norm["unchecked"]) == (1, 0), str(report)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"sample": 0}, "how many elements of each parameter"),
        ({"sample": 1.5}, "how many elements of each parameter"),
        ({"sample": "all"}, "how many elements of each parameter"),
        ({"groups": 7}, "no optimizer has a group 7, but 0 (matrices), 1"),
        ({"groups": "matrix"}, "no optimizer has a group 'matrix'"),
    ],
)
def test_a_choice_that_cannot_be_is_told_and_costs_the_job_nothing(tmp_path, options, words):
    torch.manual_seed(0)
    module = Model()
    optimizer = torch.optim.AdamW([{"params": [*module.parameters()], "name": "matrices"}, {"params": []}])
    with backtape.Recorder(dir=tmp_path / "run", steps="0") as recorder, recorder.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer, **options)
        module(torch.arange(9)).square().mean().backward()
        optimizer.step()
    (_, reason), *_ = reading.omissions(tmp_path / "run")
    assert words in reason


def test_a_block_that_was_declared_and_not_recorded_is_missing_and_no_other_element_is(tmp_path):
    shape, blocks = (40, 30), ([[0, 1], [3, 9]], [[20, 21], [0, 30]])
    sampled = {"sample": 36, "seed": 0, "parameters": {"w": {"shape": shape, "boxes": blocks}}}
    said = {"version": 1, "rank": 0, "parameters": {}, "optimizers": [], "sampled": sampled}
    for run, recorded in (("all", blocks), ("one", blocks[:1])):
        with backtape.Recorder(dir=tmp_path / run, strict=True) as recorder:
            with recorder.step(0) as tape:
                tape.record("step.before:w", torch.zeros(shape), regions=recorded)
                tape.record("step.reduced:w", torch.zeros(shape).numpy(), regions=recorded)
                addend = {"partial": "sum", "when": "pre_reduce", "microbatch": 0}
                tape.record("step.grad:w", torch.zeros(shape), regions=recorded, **addend)
                text = np.frombuffer(json.dumps(said).encode(), np.uint8)
                tape.record("step.declared:0", text)
        report, _ = replayed(tmp_path / run, 0)
        assert report.json["dump"]["proved"] == (run == "all"), str(report)
        kinds = ["has 0 addends where other elements have 1", "nothing intact holds"]
        gaps = [one for one in report.json["findings"] if any(kind in one for kind in kinds)]
        # The second block, of the gradient in three cells of the grid that the blocks make.
        assert [sum(kind in gap for gap in gaps) for kind in kinds] == ([0, 0] if run == "all" else [3, 2])
        assert all("[20:21, " in gap for gap in gaps)


SCENARIOS = {"ddp": 2, "fsdp2": 2, "fsdp1": 2, "rank-doubled": 2, "norm-local": 2, "same-bits": 2}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sampled")
    run_ranks(PROGRAM, 2, free_port(), directory, *SCENARIOS)
    return directory


@pytest.mark.parametrize("scenario", ["ddp", "fsdp2", "fsdp1"])
def test_ranks_record_their_parts_of_the_same_blocks_and_the_step_agrees(jobs, scenario):
    run = jobs / scenario / "run"
    report, algebra = replayed(run, 1)
    assert report.verdict == "agreed" and report.json["dump"]["proved"], str(report)
    stages = {stage["stage"]: stage for stage in algebra["stages"]}
    wanted = {"reduce", "norm", "clip", "state", "update"} | ({"param"} if scenario == "ddp" else set())
    assert set(stages) - {"accumulate"} == wanted, str(report)
    assert all(stage["agreed"] and not stage["unchecked"] for stage in stages.values()), str(report)
    sampled = declared(run, 1)["sampled"]
    assert sampled == declared(run, 1, rank=1)["sampled"]
    for (tensor, _, rank), shards in shards_of(run, 1).items():
        name = tensor.partition(":")[2]
        blocks = sampled["parameters"].get(name)
        if blocks is None or tensor.startswith("step.declared"):
            continue
        regions = [tuple(map(tuple, box)) for box in blocks["boxes"]]
        is_addend = tensor.startswith(("step.grad", "step.accumulated"))
        if is_addend or scenario == "ddp":
            assert sorted(shards) == sorted(regions), (tensor, rank)
        else:
            inside = [any(within(part, region) for region in regions) for part in shards]
            assert all(inside), (tensor, rank)


def within(part, region):
    return all(low <= a and b <= high for (a, b), (low, high) in zip(part, region))


def test_a_fault_of_one_rank_of_a_sharded_job_is_named(jobs):
    report, algebra = replayed(jobs / "rank-doubled" / "run", 1)
    group = algebra["diverged"][0]
    assert group["stage"] == "reduce" and group["ranks"] == [1], str(report)
    assert group["factor"] == pytest.approx(2, rel=1e-6), str(report)


def test_a_norm_of_one_rank_alone_is_found_though_gradients_are_sampled(jobs):
    report, algebra = replayed(jobs / "norm-local" / "run", 1)
    group = algebra["diverged"][0]
    assert group["stage"] == "norm" and group["reading"]["cause"] == "norm-local-not-global", str(report)


def test_recording_changes_no_bit_of_200_steps(jobs):
    """The scenario compares losses and parameters itself; here that every step was recorded."""
    for mode in ("everything", "sampled"):
        run = backtape.open(jobs / "same-bits" / mode)
        assert run.steps == tuple(range(200))
        assert any(key[0] == "step.after:0.weight" for key in run.step(199).keys())
