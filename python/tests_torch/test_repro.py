"""`replay export --repro --framework torch`: the script in PyTorch's words."""

import os

from repros import judge

SEED = int(os.environ.get("BACKTAPE_SEED", 20261123))


def test_a_script_of_any_head_finds_the_gradients_that_were_captured(tmp_path):
    judge(tmp_path, SEED, "torch")
