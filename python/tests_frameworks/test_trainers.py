"""Trainers of docs/trainers.md, recorded as they stand: those that take seconds. Of some the run as it is stands in
test_callbacks.py and test_launchers.py, so that here only the planted fault is looked for."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tests/trainers"))

import run as trainers  # noqa: E402

BOTH = ("trl SFTTrainer, LoRA", "trl DPOTrainer", "trl GRPOTrainer", "trl RewardTrainer")
FAULT_ALONE = ("transformers Trainer", "Lightning")


@pytest.mark.parametrize("name", BOTH)
def test_a_trainer_agrees_as_it_is_and_its_fault_is_named(tmp_path, name):
    trainer = trainers.TRAINERS[name]
    clean, faulty = trainers.reports(trainer, tmp_path, None, tmp_path)
    assert clean.verdict == "agreed", clean
    assert trainers.told(faulty) == trainer.told, faulty


@pytest.mark.parametrize("name", FAULT_ALONE)
def test_the_fault_of_a_trainer_is_named(tmp_path, name):
    trainer = trainers.TRAINERS[name]
    report = trainers.recorded(trainer, trainer.fault, tmp_path, {})
    assert trainers.told(report) == trainer.told, report
