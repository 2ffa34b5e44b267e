"""`Recorder.from_env`: which variables say what, and who wins."""

import numpy as np
import pytest
import reading

import backtape
from backtape.launch import launch_name
from backtape.settings import mesh_coordinates, rank_and_world_size


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"RANK": "5", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (5, 8)),
        ({"BACKTAPE_RANK": "7", "BACKTAPE_WORLD_SIZE": "9", "RANK": "0", "WORLD_SIZE": "1"}, (7, 9)),
        # A batch script is one process, whatever its allocation.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1)),
        ({"RANK": "3"}, (0, 1)),
    ],
)
def test_rank_and_world_size_come_from_one_launcher(environment, expected):
    assert rank_and_world_size(environment) == expected


TORCHRUN = {"TORCHELASTIC_RUN_ID": "job 7", "TORCHELASTIC_RESTART_COUNT": "2"}
SLURM = {"SLURM_JOB_ID": "90", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "8"}


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, None),
        # Agents count the restarts that they asked for: only where there is one do all ranks agree.
        (TORCHRUN | {"GROUP_WORLD_SIZE": "2"}, "torchrun-job-7"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "1"}, "torchrun-job-7-2"),
        (SLURM, "slurm-90.3/0"),
        (SLURM | {"SLURM_RESTART_COUNT": "4"}, "slurm-90.3/4"),
        # One srun for each node: the steps differ, the launch is one.
        (SLURM | {"SLURM_STEP_NUM_TASKS": "4"}, "slurm-90/0"),
        # One task a node, which starts the ranks of its node.
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2", "LOCAL_WORLD_SIZE": "4"}, "slurm-90.3/0"),
        (SLURM | {"SLURM_JOB_ID_HET_GROUP_0": "89"}, "slurm-89.3/0"),
        (SLURM | TORCHRUN, "slurm-90.3+torchrun-job-7/0"),
        ({"PMIX_NAMESPACE": "prterun-h-5@1", "OMPI_COMM_WORLD_SIZE": "8"}, "mpi-prterun-h-5@1"),
        ({"PMIX_NAMESPACE": "prterun-h-5@1", "OMPI_COMM_WORLD_SIZE": "4"}, None),
    ],
)
def test_all_ranks_of_a_launch_give_it_one_name(environment, expected):
    assert launch_name(environment, 8) == expected


def test_a_launch_has_the_name_that_it_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("BACKTAPE_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("BACKTAPE_STEPS", "0")
    monkeypatch.setenv("BACKTAPE_STRICT", "1")
    monkeypatch.setenv("BACKTAPE_LAUNCH", "job/../7")
    with pytest.raises(backtape.RecorderError, match="launch cannot be recorded under its name"):
        backtape.Recorder.from_env()
    monkeypatch.setenv("BACKTAPE_LAUNCH", "job/7")
    with backtape.Recorder.from_env() as recorder, recorder.step(0) as tape:
        tape.record("x", np.ones(3))
    assert '"name":"job/7"' in (tmp_path / "run" / "journal.jsonl").read_text()


def test_without_steps_nothing_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setenv("BACKTAPE_DIR", str(tmp_path / "run"))
    recorder = backtape.Recorder.from_env()
    assert not recorder.active and recorder.close() is None
    assert not (tmp_path / "run").exists()


def test_the_environment_chooses_directory_steps_and_run(monkeypatch, tmp_path):
    monkeypatch.setenv("BACKTAPE_DIR", str(tmp_path))
    monkeypatch.setenv("BACKTAPE_RUN", "run-b")
    monkeypatch.setenv("BACKTAPE_STEPS", "2,5-6")
    monkeypatch.setenv("BACKTAPE_STRICT", "1")
    recorder = backtape.Recorder.from_env(mesh={"data": 1})
    assert [step for step in range(8) if recorder.wants(step)] == [2, 5, 6]
    with recorder.step(5) as tape:
        tape.record("x", np.ones(3))
    assert recorder.close().steps_committed == [5]
    assert reading.manifest(tmp_path / "run-b", 5)["mesh"] == [["data", 1]]


def test_a_call_wins_over_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("BACKTAPE_STEPS", "0")
    monkeypatch.setenv("BACKTAPE_DIR", str(tmp_path / "not-here"))
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with backtape.Recorder.from_env(dir=tmp_path / "run", rank=0, world_size=1) as recorder:
        with recorder.step(0) as tape:
            tape.record("x", 1.0)
    assert reading.only(tmp_path / "run", "x").record["rank"] == 0


@pytest.mark.parametrize(
    "variable, value",
    [
        ("BACKTAPE_STEPS", "first"), ("BACKTAPE_DIR", ""), ("BACKTAPE_ATTEMPT", "last"),
        ("BACKTAPE_PLACE_PROOF", "maybe"), ("BACKTAPE_TRANSPORT", "pigeon"), ("BACKTAPE_RANK", "x"),
    ],
)  # fmt: skip
def test_a_variable_that_cannot_be_read_leaves_an_inactive_recorder(
    monkeypatch, tmp_path, variable, value
):
    monkeypatch.setenv("BACKTAPE_STEPS", "0")
    monkeypatch.setenv("BACKTAPE_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("BACKTAPE_WORLD_SIZE", "1")
    monkeypatch.setenv(variable, value)
    assert not backtape.Recorder.from_env().active
    monkeypatch.setenv("BACKTAPE_STRICT", "1")
    with pytest.raises(backtape.RecorderError):
        backtape.Recorder.from_env()


def test_ranks_count_along_the_last_axis_of_a_dict_mesh_first():
    mesh = {"data": 2, "tensor": 3}
    assert mesh_coordinates(mesh, 4, 6) == {"data": 1, "tensor": 1}
    assert mesh_coordinates(mesh, 0, 8) == {}, "a mesh that is not the whole job says nothing"
