"""Simulates clean jobs, replays their steps, and prints how many alarms there were.

    python tests/step_campaign/run.py --runs 1000
    python tests/step_campaign/run.py --first 4711 --runs 1 --keep /tmp/job      # one job, its dump kept

The numbers of a job come from the seed and its index. `replay` is backtape's in this environment, or
the binary $REPLAY.
"""

import sys
from pathlib import Path

# The campaign is a package beside this file.
sys.path[:] = [
    str(Path(__file__).parents[1]),
    *(p for p in sys.path if p != str(Path(__file__).parent)),
]

from step_campaign.campaign import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
