"""Generates cases of the planted-fault corpus, replays them, and prints the confusion table.

    python tests/corpus/run.py                                 # all causes, 8 draws each
    python tests/corpus/run.py --cause label-shift --draws 20
    python tests/corpus/run.py --only label-shift-7 --keep /tmp/case    # one case, its dump kept
    python tests/corpus/run.py --part held-out                 # programs in numpy, in ranges that
                                                               # nothing was developed on
    python tests/corpus/run.py --publish                       # and writes docs/causes-table.md, or that of another --part

`replay` is the release binary: $REPLAY, or the one below $CARGO_TARGET_DIR or target/.
"""

import sys
from pathlib import Path

# The corpus is a package beside this file; its modules' names are common ones.
sys.path[:] = [str(Path(__file__).parents[1]), *(p for p in sys.path if p != str(Path(__file__).parent))]

from corpus.bench import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
