"""What `cargo test` compiles serves the wheel of the tests too."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def features(edges, *package):
    """For each library that is compiled for a package, or for what `cargo test` takes by default, its features."""
    command = ["cargo", "tree", "--locked", "--offline", "--edges", edges, "--prefix", "none", "--format", "{p}|{f}"]
    command += package
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert listed.returncode == 0, listed.stderr
    lines = (line.removesuffix(" (*)").split("|") for line in listed.stdout.splitlines() if line)
    return {library: with_features for library, with_features in lines}


def test_the_wheel_asks_for_its_libraries_with_the_features_that_the_tests_ask_for():
    wheel, tests = features("normal", "--package", "backtape-python"), features("normal,dev")
    shared = wheel.keys() & tests.keys()
    assert len(shared) > 100
    differ = [f"{name}: {wheel[name]} / {tests[name]}" for name in sorted(shared) if wheel[name] != tests[name]]
    # Each library that differs is compiled twice, with all that is built on it: add the feature to python/Cargo.toml.
    assert not differ, "\n".join(differ)
