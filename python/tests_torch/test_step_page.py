"""The walks of docs/step.md: each job that it trains, and each report that it shows, run anew in their order."""

import subprocess
import sys
from pathlib import Path

from docs_site.pages import BIN, ROOT, blocks, masked, same

PAGE = ROOT / "docs/step.md"


def run(command, directory):
    """What a command of the page prints, in a directory that has the examples."""
    environment = {"PATH": f"{BIN}:/usr/bin:/bin", "COLUMNS": "100", "JAX_PLATFORMS": "cpu", "HOME": str(directory)}
    return subprocess.run(
        ["bash", "-c", command], cwd=directory, env=environment, capture_output=True, text=True, timeout=400
    )


def test_every_walk_prints_what_the_page_shows(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shown = [block for block in blocks((PAGE,)) if block.is_transcript]
    assert len(shown) >= 3 and Path(sys.executable).parent == BIN
    for command, expected in (pair for block in shown for pair in block.transcript()):
        done = run(command, tmp_path)
        said = done.stdout + done.stderr
        if command.startswith("replay"):
            assert same(expected, said), f"{command}\n{said}\n--- masked\n{masked(said)}\n{masked(expected)}"
            continue
        # Training jobs may print more, as of their connections.
        assert done.returncode == 0, said
        assert all(masked(line) in masked(said) for line in expected.splitlines()), said
