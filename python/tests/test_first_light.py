"""deploy/gpu/first-light.sh, as far as a machine without a GPU and without a kit can show: what is missing is said
in one sentence, with what to do, before anything is run."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy/gpu/first-light.sh"


def first_light(*arguments):
    return subprocess.run([SCRIPT, *map(str, arguments)], capture_output=True, text=True)


def test_without_a_kit_it_says_what_is_missing_and_how_to_make_it(tmp_path):
    ended = first_light("--kit", tmp_path / "kit", "--out", tmp_path / "out")
    assert ended.returncode == 2 and ended.stdout == ""
    assert "bin/replayer-tests.gz is missing: make the kit with deploy/gpu/pack.sh" in ended.stderr


def test_a_damaged_program_of_the_kit_is_named(tmp_path):
    (tmp_path / "kit/bin").mkdir(parents=True)
    packed = tmp_path / "kit/bin/replayer-tests.gz"
    packed.write_bytes(b"\x1f\x8b no gzip")
    ended = first_light("--kit", tmp_path / "kit", "--out", tmp_path / "out")
    assert ended.returncode == 2
    assert f"{packed} is damaged: pack and carry it again" in ended.stderr


@pytest.mark.parametrize("arguments, said", [(["--kitt", "x"], "--kitt is no option"), (["nothing"], "nothing is no stage")])
def test_what_it_does_not_know_is_refused_at_once(tmp_path, arguments, said):
    ended = first_light(*arguments)
    assert ended.returncode == 2 and said in ended.stderr
