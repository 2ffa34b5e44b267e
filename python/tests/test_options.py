"""The options of `tape.head` stand once: what is said of them elsewhere is made from that."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_docs_docstring_and_types_tell_of_every_option_as_the_table_does():
    sys.path.insert(0, str(ROOT / "python/docs"))
    import options

    for page, text in options.pages().items():
        assert page.read_text() == text, f"{page.name}: run python python/docs/options.py"


def test_a_misspelt_option_of_the_head_is_found_before_the_job_runs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import backtape\n\n\n"
        "def declare(tape: backtape.Tape) -> None:\n"
        '    tape.head(path="fused", softcap=30.0, denominator=4.0, scope={"ranks": "one"})\n'
        '    tape.head(loss="grpo", grpo={"clip_low": 0.2, "kl": "k3"})\n'
        "    tape.head(softcapp=30.0)\n"
        '    tape.head(reduction="max")\n'
        '    tape.head(grpo={"beta": 0.1})\n'
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", sys.executable, script.name]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    wrong = {int(line.split(":")[1]) for line in checked.stdout.splitlines() if ": error" in line}
    assert wrong == {7, 8, 9}, checked.stdout + checked.stderr
