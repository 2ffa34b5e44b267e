"""Tests of jobs of other libraries, in an environment of their own (`make test-frameworks`)."""

import os
import sys
from pathlib import Path

for name in [name for name in os.environ if name.startswith("BACKTAPE_")]:
    del os.environ[name]

# Nothing is downloaded.
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

# What runs ranks, and what says which report is right, is shared with the other tests.
for directory in ("tests", "tests_torch"):
    sys.path.append(str(Path(__file__).parents[1] / directory))
