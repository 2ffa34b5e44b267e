"""deploy/Dockerfile: its rules are kept. That it builds is not shown here, as no registry of images is reached:
deploy/README.md says what was run by hand."""

import subprocess
import sys
from pathlib import Path

from test_deploy import ROOT, required

HADOLINT = Path(sys.executable).with_name("hadolint")


def test_the_dockerfile_is_clean_by_hadolint():
    required(None if HADOLINT.exists() else "hadolint is not installed (python/requirements-dev.txt)")
    done = subprocess.run([HADOLINT, ROOT / "deploy" / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_the_dockerfile_takes_from_the_repository_is_there():
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    pins = (ROOT / "python" / "requirements-dev.txt").read_text()
    assert "'^maturin=='" in text and "\nmaturin==" in pins
    # The image's compiler is new enough for the workspace.
    [wanted] = [line.split('"')[1] for line in (ROOT / "Cargo.toml").read_text().splitlines() if "rust-version = " in line]
    [image] = [line.split(":")[1].split("-")[0] for line in text.splitlines() if line.startswith("ARG RUST_IMAGE")]
    assert tuple(map(int, image.split("."))) >= tuple(map(int, wanted.split(".")))[:2]
