"""Clean steps raise no alarm: a share of the campaign that `make bench-step-false-alarms` runs.

Goal: what is right and seldom (formats of few bits, gradients of zeros, clipping to 0, steps that are left out) is not
called wrong. Method: simulated ranks with torch's optimizers, recorded and replayed; BACKTAPE_SEED draws other jobs.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from step_campaign import job as jobs  # noqa: E402
from step_campaign.campaign import TOGETHER, Outcome, Table, run_of  # noqa: E402

RUNS = 4


def test_clean_steps_raise_no_alarm(tmp_path):
    seed = int(os.environ.get("BACKTAPE_SEED", 41))
    print(f"BACKTAPE_SEED={seed}")
    table = Table()
    for run in range(RUNS):
        first = run * TOGETHER
        for plain in run_of(seed, first, first + TOGETHER - 1, str(tmp_path), "torch"):
            outcome = Outcome(**plain)
            table.add(outcome)
            assert not outcome.is_alarm and outcome.verdict != "error", (outcome.mesh, outcome.details)
    text = table.text()
    print(text)
    assert table.jobs == RUNS * TOGETHER
    judged, unchecked = table.judged()
    assert judged >= 9 * unchecked, text


@pytest.mark.parametrize("index", [1422, 4147])
def test_no_job_sums_in_few_bits_where_nothing_shows_it(index):
    """Such a sum is a finding, so that a job which neither records it nor sends it so is none that is right."""
    kind, mesh = jobs.meshes(np.random.default_rng([20261137, index // TOGETHER, 0xABCD]))
    _, job = jobs.job_of(20261137, index, 0, kind, mesh)
    assert job.formats.accumulator in (torch.bfloat16, torch.float16) and job.sent == job.formats.reduced == torch.float32
    assert job.has_accumulated
