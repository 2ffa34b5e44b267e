"""Trains small jobs in torch with a planted fault in their step, replays them, and prints a table.

    python tests/step_corpus/run.py --part develop            # all faults, 8 draws each
    python tests/step_corpus/run.py --part held-out --draws 20
    python tests/step_corpus/run.py --only clip-twice-3 --keep /tmp/case    # one case, its dumps kept
    python tests/step_corpus/run.py --keep /tmp/all --again   # judges the dumps that lie there

A case is named FAULT-DRAW; its fixed twin is the same job without the fault. `replay` is the release
binary: $REPLAY, or the one below $CARGO_TARGET_DIR or target/.
"""

import sys
from pathlib import Path

# The corpus is a package beside this file.
sys.path[:] = [
    str(Path(__file__).parents[1]),
    *(p for p in sys.path if p != str(Path(__file__).parent)),
]

from step_corpus.bench import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
