"""Writes the transcripts of a page anew: `python python/tests/docs_site/refresh.py docs/guide.md DUMPS`.

DUMPS holds the runs that the page's commands name under dumps/. A transcript keeps its `...` lines
only where it is written by hand: what is here is the whole output.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docs_site.pages import Site, blocks, reason_elsewhere


def main(page: Path, dumps: Path) -> None:
    """Runs the page's transcripts in order and writes what they printed."""
    text = page.read_text().splitlines()
    with tempfile.TemporaryDirectory() as directory:
        made = {run.name: run for run in dumps.iterdir() if run.is_dir()}
        site = Site(Path(directory) / "site", made)
        fresh = {}
        for block in (block for block in blocks((page,)) if block.is_transcript):
            lines = []
            for command, before in block.transcript():
                lines.append(f"$ {command}")
                if reason_elsewhere(command) or "..." in before.splitlines():
                    lines += before.splitlines()
                    continue
                ended = site.run(site.local(command))
                lines += (ended.stdout + ended.stderr).rstrip("\n").splitlines()
            fresh[block.line] = (len(block.lines), lines)
        site.stop()
    for line in sorted(fresh, reverse=True):
        count, lines = fresh[line]
        text[line : line + count] = lines
    page.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
