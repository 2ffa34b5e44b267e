"""The commands of the docs: found in README.md and docs/*.md, and run in a prepared directory."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
HERE = Path(__file__).parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Run by another test, or by nobody here: the command, and who runs it or why not.
ELSEWHERE = [
    (r"make demo", "the whole of it at full size: minutes; test_post_mortem runs its job and its replays"),
    (r"make test", "it is what runs this"),
    (r"make (bench|pictures|step-causes|soak.*)", "hours; their own targets say what they measure"),
    (r"replay --dump demo/fused-defect .*", "needs make demo; docs/guide.md has the same at a smaller size"),
    (r".*s3://.*", "needs a bucket: `cargo test buckets` runs the same against an S3 server on loopback"),
    (r"cargo install .*", "builds for minutes; the binaries it installs are those that every test runs"),
    (r"make wheel", "the release build takes minutes; make test builds the same wheel with the tests' profile"),
    (r"pip install .venv/wheels/.*", "make test installs the wheel that it built, and runs what it brings"),
    (r".*examples/train_torch.py .*|replay --dump dumps/(sum|uncorrected) .*|BACKTAPE_STEPS=2 .*/train_jax.py .*",
     "needs torch, or lies beside what does: tests_torch/test_step_page.py runs every walk of docs/step.md"),
    (r"backtape run .*|replay --dump dumps/(plain|bug) .*",
     "needs torch: tests_torch/test_step_page.py runs the walks of docs/attach.md that are in torch"),
    (r"jupyter .*", "a program of its own; test_notebook executes the page"),
    (r"cargo (test|build|bench) .*|soak .*|target/.*", "tests and campaigns: they run beside this one"),
]

# What stands in the docs for something of the reader's, and what it is in the prepared directory.
WORDS = [
    (r"(?<![\w/.:-])/dumps\b", "dumps"),
    (r"(--dump|ls|--dir) DIR\b", r"\1 dumps/run-a"),
    (r"\bdiff A B\b", "diff dumps/run-a dumps/run-b"),
    (r"--world-size \d+", "--world-size 1"),
    (r"--host node-0\b", "--host node-0 --host 127.0.0.1"),
]
ADDRESS = re.compile(r"\bHOST:PORT\b|\b(?:head-)?node(?:-\d)?:7447\b|\b0\.0\.0\.0:7447\b|\b127\.0\.0\.1:7447\b")

# How long a command, and a job or a coordinator that it needs, may take.
DEADLINE_S = 400


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: commands, or a transcript of commands and what they printed."""

    page: Path
    line: int
    language: str
    lines: tuple[str, ...]

    @property
    def name(self):
        return f"{self.page.name}:{self.line}"

    @property
    def is_transcript(self):
        return self.language in ("", "text", "console") and any(line.startswith("$ ") for line in self.lines)

    def commands(self):
        """The commands of an `sh` block, continued lines joined, remarks left out."""
        text = re.sub(r"\\\n\s*", "", "\n".join(self.lines))
        stripped = (re.sub(r"(^|\s+)#.*$", "", line).strip() for line in text.splitlines())
        return [line for line in stripped if line]

    def transcript(self):
        """Pairs of a command and what it printed."""
        pairs = []
        for line in self.lines:
            if line.startswith("$ "):
                pairs.append((line[2:], []))
            elif pairs:
                pairs[-1][1].append(line)
        return [(command, "\n".join(printed)) for command, printed in pairs]


def blocks(pages=tuple(PAGES)):
    found = []
    for page in pages:
        start, language, lines = None, "", []
        for number, line in enumerate(page.read_text().splitlines(), 1):
            fence = re.match(r"\s*```(\w*)", line)
            if fence and start is None:
                start, language, lines = number, fence[1], []
            elif fence:
                found.append(Block(page, start, language, tuple(lines)))
                start = None
            elif start is not None:
                lines.append(line)
    return found


def reason_elsewhere(command):
    return next((why for pattern, why in ELSEWHERE if re.fullmatch(pattern, command)), None)


class Site:
    """A directory in which the commands of one page run: dumps, a job, and what they start."""

    def __init__(self, directory: Path, made: dict[str, Path]):
        self.path = directory
        (directory / "dumps").mkdir(parents=True)
        for name, source in made.items():
            shutil.copytree(source, directory / "dumps" / name)
        shutil.copy(HERE / "train.py", directory)
        shutil.copy(ROOT / "examples/post_mortem.ipynb", directory)
        (directory / "examples").mkdir()
        shutil.copy(ROOT / "examples/train_plain_jax.py", directory / "examples")
        policy = next(block for block in blocks() if block.language == "toml")
        (directory / "mine.toml").write_text("\n".join(policy.lines))
        self.running = contextlib.ExitStack()
        self.address = None
        self.live = None

    def environment(self):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BACKTAPE_")}
        return kept | {"PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "100"}

    def local(self, command):
        """The command with what is the reader's replaced by what is here."""
        for pattern, word in WORDS:
            command = re.sub(pattern, word, command)
        if self.address:
            command = ADDRESS.sub(self.address, command)
        if re.match(r"coordinator (plan|trigger|status)", command):
            # Of the job that runs here: run-a is a dump that other commands read.
            command = re.sub(r"(--run |--dir dumps/)run-a\b", rf"\1{self.live_run(command)}", command)
        if " certs " in command and (self.path / "creds").exists():
            command = command.replace("--out creds", f"--out creds-{time.monotonic_ns()}")
        return command

    @staticmethod
    def live_run(command):
        """The run of the job that a command asks of: with a coordinator inside, or over one."""
        return "live-own" if "--dir" in command else "live"

    def run(self, command, most=DEADLINE_S):
        return subprocess.run(
            ["bash", "-c", command], cwd=self.path, env=self.environment(), capture_output=True, text=True, timeout=most
        )

    def start(self, command, until):
        """A process that goes on; its log up to the line that says that it is there."""
        command = f"exec {command}" if not re.match(r"\w+=", command) else f"export {command.replace(' python', '; exec python', 1)}"
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=self.path, env=self.environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.running.callback(self.end, process)
        log = ""
        while not re.search(until, log):
            line = process.stdout.readline()
            assert line, f"{command} ended: {log}"
            log += line
        return log

    @staticmethod
    def end(process):
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        process.kill()

    def serve(self, command):
        """`coordinator --listen ...`, on a port of its own."""
        self.stop()
        listen = re.sub(r"--listen \S+", "--listen 127.0.0.1:0", command)
        listen = listen if "--listen" in listen else f"{listen} --listen 127.0.0.1:0"
        log = self.start(self.local(listen), "listening on")
        self.address = re.search(r"listening on (\S+),", log)[1]

    def work(self, command):
        """A job that is running, for what asks of one: over the coordinator that the command names,
        or with one inside."""
        by = "dir" if "--dir" in command else "coordinator"
        if self.live == by:
            return
        if by == "dir":
            self.stop()
        elif self.address is None:
            self.serve("coordinator --store dumps --world-size 1")
        words = f"BACKTAPE_TEST_LIVE={self.path / 'stop'} BACKTAPE_WATCH=1 BACKTAPE_STEPS=none BACKTAPE_DIR=dumps/{self.live_run(command)}"
        if by == "coordinator":
            words += f" BACKTAPE_COORDINATOR={self.address}"
        if found := re.search(r"--credentials (\S+)", command):
            words += f" BACKTAPE_CREDENTIALS={found[1]}"
        self.start(f"{words} python train.py", "step 1")
        self.live = by

    def stop(self):
        """Ends what this started."""
        self.running.close()
        self.address = self.live = None

    def obey(self, command):
        """Runs a command of the docs; what went wrong, or nothing."""
        if re.match(r"coordinator (--listen|--store)", command):
            self.serve(command)
            return None
        if re.match(r"coordinator (plan|trigger|status)", command):
            self.work(command)
        elif ADDRESS.search(command) and self.address is None:
            self.serve("coordinator --store dumps --world-size 1")
        given = self.local(command)
        if "python train.py" in given:
            for name, value in (("BACKTAPE_STEPS", "0"), ("BACKTAPE_DIR", "dumps/live")):
                given = given if name in given else f"{name}={value} {given}"
        ended = self.run(given)
        # A replay that finds a divergence has done what it was asked.
        fine = (0, 1) if given.startswith("replay") else (0,)
        if ended.returncode in fine:
            return None
        return f"{given}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}"


def masked(text):
    """Text without what differs between machines: digits, and how lines are broken."""
    # A comma or full stop behind a number belongs to the sentence.
    text = re.sub(r"[-+]?\d[\d,.]*(?<![,.])(?:e[-+]?\d+)?", "#", text)
    return " ".join(text.split())


def same(expected, printed):
    """Whether a transcript is what was printed; a line `...` stands for any lines."""
    rest = masked(printed)
    parts = [masked(part) for part in re.split(r"(?m)^\s*\.\.\.\s*$", expected)]
    if len(parts) == 1:
        return parts[0] == rest
    if not rest.startswith(parts[0]) or not rest.endswith(parts[-1]):
        return False
    for part in parts:
        at = rest.find(part)
        if at < 0:
            return False
        rest = rest[at + len(part) :]
    return True
