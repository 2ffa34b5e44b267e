"""The walks of docs/step.md and docs/attach.md: each job that they train, and each report that they show, run anew
in their order."""

import subprocess
import sys
from pathlib import Path

import pytest
from docs_site.pages import BIN, ROOT, blocks, masked, same

PAGES = {"step": 3, "attach": 3}  # with how many transcripts each has at least
# Where jobs need optax, which is beside jax: python/tests/test_docs.py runs these.
ELSEWHERE = ("train_plain_jax.py", "dumps/jax")


def run(command, directory):
    """What a command of the page prints, in a directory that has the examples."""
    environment = {"PATH": f"{BIN}:/usr/bin:/bin", "COLUMNS": "100", "JAX_PLATFORMS": "cpu", "HOME": str(directory)}
    return subprocess.run(
        ["bash", "-c", command], cwd=directory, env=environment, capture_output=True, text=True, timeout=400
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_walk_prints_what_the_page_shows(tmp_path, page):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shown = [block for block in blocks((ROOT / f"docs/{page}.md",)) if block.is_transcript]
    assert len(shown) >= PAGES[page] and Path(sys.executable).parent == BIN
    for command, expected in (pair for block in shown for pair in block.transcript()):
        if any(word in command for word in ELSEWHERE):
            continue
        done = run(command, tmp_path)
        said = done.stdout + done.stderr
        if command.startswith("replay"):
            assert same(expected, said), f"{command}\n{said}\n--- masked\n{masked(said)}\n{masked(expected)}"
            continue
        # Training jobs may print more, as of their connections.
        assert done.returncode == 0, said
        assert all(masked(line) in masked(said) for line in expected.splitlines()), said
