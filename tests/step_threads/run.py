"""Trains the jobs of public threads, wrong and mended, replays them, and prints what the replay says.

    python tests/step_threads/run.py
    python tests/step_threads/run.py --only megatron_6660 --keep /tmp/case    # its dumps kept
    python tests/step_threads/run.py --publish                                # writes docs/step-threads.md

The Python that runs this needs backtape and torch; jobs in jax run under --jax, by default the same.
`replay` is $REPLAY, or the release binary below $CARGO_TARGET_DIR or target/.
"""

import sys
from pathlib import Path

# The cases are a package beside this file.
sys.path[:] = [
    str(Path(__file__).parents[1]),
    *(p for p in sys.path if p != str(Path(__file__).parent)),
]

from step_threads.bench import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
