"""The callbacks for trainers of other libraries: trainings that are right agree, nothing is recorded twice, and a
training that raises is closed where it does."""

import subprocess
import sys
from pathlib import Path

import pytest

import backtape

JOBS = Path(__file__).with_name("callback_jobs.py")
TRAINERS = ("transformers", "trl", "lightning")
RUN = [sys.executable, "-m", "backtape", "run"]


def trained(*words, before=()):
    done = subprocess.run(
        [*before, sys.executable, str(JOBS), *map(str, words)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


def assert_whole(directory, step):
    report = backtape.replay(directory, step=step)
    assert report.verdict == "agreed", report
    told = {stage["name"]: stage["status"] for stage in report.json["stages"]}
    assert {told["loss"], told["dq"], told["dk"]} == {"pass"}, report
    judged = {stage["stage"]: stage["agreed"] for stage in report.json["algebra"]["stages"]}
    assert judged["accumulate"] and judged["clip"] and judged["update"], report


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_training_with_a_callback_agrees_and_is_closed_when_it_ends(tmp_path, trainer):
    done = trained(trainer, tmp_path / "run", "1")
    assert done.stderr.count("backtape: recorded step 1") == 1, done.stderr
    assert_whole(tmp_path / "run", 1)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_under_backtape_run_the_steps_are_those_of_the_command_and_recorded_once(tmp_path, trainer):
    options = ["--steps", "2", "--dir", tmp_path / "asked", "--"]
    done = trained(trainer, tmp_path / "own", "0", before=[*RUN, *map(str, options)])
    assert done.stderr.count("backtape: recorded") == 1, done.stderr
    assert not (tmp_path / "own").exists()
    assert [place.name for place in (tmp_path / "asked").glob("**/step-*")] == ["step-00000002"]
    assert_whole(tmp_path / "asked", 2)


def test_a_training_that_follows_another_one_is_recorded_once(tmp_path):
    options = ["--steps", "2", "--dir", tmp_path / "asked", "--"]
    trained("lightning", tmp_path / "own", "0", "second", before=[*RUN, *map(str, options)])
    (recorded,) = (tmp_path / "asked").glob("**/step-*")
    assert recorded.parent.name == "attempt-0001", recorded
    report = backtape.replay(tmp_path / "asked", step=2, attempt=1)
    assert report.verdict == "agreed", report


@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
def test_a_training_that_raises_is_closed_before_the_job_goes_on(tmp_path, trainer):
    done = trained(trainer, tmp_path / "run", "0-2", "raises")
    assert done.stdout.split("\n")[-3:-1] == ["the training raised", "the job goes on"]
    assert done.stderr.count("backtape: recorded step 0, 1") == 1, done.stderr
    assert_whole(tmp_path / "run", 1)


def test_a_callback_without_steps_records_nothing(tmp_path):
    done = trained("lightning", tmp_path / "run", "none")
    assert "backtape" not in done.stderr
