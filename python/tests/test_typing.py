"""The public API is typed, documented, and imports no framework."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import backtape

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(backtape.__file__).parent

# What a user writes, under mypy --strict. reveal_type holds the types to what the docs say.
SCRIPT = '''
from pathlib import Path

import numpy as np

import backtape
import backtape.variants


def train(steps: int) -> None:
    with backtape.Recorder(dir="dumps/run", steps="0", rank=0, world_size=1) as recorder:
        for step in range(steps):
            with recorder.step(step) as tape:
                if tape.active:
                    tape.head(loss="softmax_xent", path="fused")
                    tape.record("q", np.zeros((4, 8), np.float32), microbatch=0)
            recorder.scalars(step, loss=1.0)
    summary = recorder.close()
    if summary is not None:
        reveal_type(summary.steps_committed)


def look() -> float:
    run = backtape.open(Path("dumps/run"), run=None)
    step = run.step(0)
    captured = step.tensor("dk", microbatch=0, when="pre_reduce", rank=3)
    reference = step.stage("dk", 0, rank=3, policy=None, tokens=None)
    reveal_type(step.manifest)
    reveal_type(reference)
    for name, microbatch, when in step.keys():
        reveal_type(microbatch)
    report = backtape.replay("dumps/run", step=0, compare=["dk"], variants={"mine": mine})
    reveal_type(report.verdict)
    return float(np.abs(captured.astype(np.float64) - reference).max())


def mine(unit: backtape.variants.Unit) -> dict[str, object]:
    assert unit.q is not None
    return {"dq": unit.q * 0}
'''
REVEALED = [
    "list[int]", "dict[str, Any]", "ndarray[tuple[Any, ...], dtype[float64]]", "int | None", "str",
]  # fmt: skip
WRONG = '''
import backtape

backtape.open(3)
backtape.open("d").step("0")
backtape.open("d").step(0).tensor("q", when="sometime")
backtape.replay("d", comparing=["dk"])
'''


def mypy(tmp_path, text):
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", sys.executable, script.name]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)


def test_a_users_script_is_typed_through_and_through(tmp_path):
    checked = mypy(tmp_path, SCRIPT)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    notes = [line for line in checked.stdout.splitlines() if "Revealed type" in line]
    assert len(notes) == len(REVEALED), checked.stdout
    for note, kind in zip(notes, REVEALED):
        plain = note.replace("builtins.", "").replace("typing.", "").replace("numpy.", "").replace("_typing.", "")
        plain = plain.replace("_nbit_base.", "").replace("None | int", "int | None")
        assert kind in plain, (note, kind)


def test_what_a_user_writes_wrong_is_found(tmp_path):
    checked = mypy(tmp_path, WRONG)
    for line in range(4, 8):
        assert f"script.py:{line}: error" in checked.stdout, checked.stdout


def test_the_package_itself_is_typed():
    # jax and torch are looked at as what they are not here: their own types are theirs.
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "--follow-imports=silent"]
    files = ["run.py", "report.py", "postmortem.py", "reading.py", "typing.py", "command.py", "doctor.py", "engine_ray.py"]
    checked = subprocess.run(
        [*command, *(f"backtape/{file}" for file in files)], capture_output=True, text=True, timeout=300, cwd=ROOT / "python"
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def public():
    """Every public name of the package and of its classes, with its docstring, from the sources:
    torch need not be installed."""
    sys.path.insert(0, str(ROOT / "python/docs"))
    import api

    for _, module, file, names, _ in api.PARTS:
        tree = ast.parse((PACKAGE / file).read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
                yield f"{module}.{node.name}", ast.get_docstring(node)
                for member in node.body if isinstance(node, ast.ClassDef) else ():
                    if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                        yield f"{module}.{node.name}.{member.name}", ast.get_docstring(member)


def test_every_public_name_has_a_docstring_and_is_on_the_page():
    sys.path.insert(0, str(ROOT / "python/docs"))
    import api

    page = (ROOT / "docs/api.md").read_text()
    named = {name.split(".")[1] for name, _ in public() if name.startswith("backtape.")}
    missing = [name for name, doc in public() if not doc]
    assert not missing, missing
    assert set(backtape.__all__) - {"__version__", "scalars"} <= named, set(backtape.__all__) - named
    absent = [name for name, _ in public() if name.rsplit(".", 1)[-1] not in page]
    assert {name.rsplit(".", 1)[-1] for name in absent} <= api.INTERNAL, absent
    for name in backtape.__all__:
        if name != "__version__":
            assert inspect.getdoc(getattr(backtape, name)), name


def test_the_page_of_the_api_is_what_the_docstrings_say():
    sys.path.insert(0, str(ROOT / "python/docs"))
    import api

    assert (ROOT / "docs/api.md").read_text() == api.page(), "run: python python/docs/api.py"


def test_what_the_readme_calls_is_there_after_importing_backtape_alone():
    program = "import backtape; print(backtape.jax.tap.__module__); backtape.jxa"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "backtape.jax", ended
    assert "AttributeError: module 'backtape' has no attribute 'jxa'" in ended.stderr, ended


@pytest.mark.parametrize("module", ["backtape", "backtape.command", "backtape.doctor", "backtape.variants"])
def test_no_framework_is_imported_and_importing_takes_no_time_that_counts(module):
    program = f"import sys, {module}; print(*{{'jax', 'torch', 'ray', 'IPython', 'pandas'}} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout.strip() == "", ended


def test_only_one_module_imports_late_or_looks_at_what_is_imported():
    """Goal: what is imported when can be read off one module. Method: the sources: no function
    imports, and only `frameworks` names importlib.import_module or sys.modules. What Python runs at its start
    is outside of it: it must not load backtape into processes that have nothing to do with it."""
    late, looking = [], []
    for path in sorted(set(PACKAGE.rglob("*.py")) - set(PACKAGE.glob("startup/*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = [one for one in ast.walk(node) if isinstance(one, ast.Import | ast.ImportFrom)]
                late += [f"{path.name}:{one.lineno}" for one in inside]
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("importlib.import_module", "sys.modules"):
                looking.append(path.name)
    assert late == [] and set(looking) == {"frameworks.py"}, (late, looking)


def test_recording_a_numpy_array_imports_no_framework(tmp_path):
    program = (
        "import sys, numpy, backtape\n"
        "with backtape.Recorder(sys.argv[1]) as recorder, recorder.step(0) as tape:\n"
        "    tape.record('q', numpy.ones((2, 3), numpy.float32))\n"
        "print(*{'jax', 'torch', 'ray', 'backtape.jax', 'backtape.torch'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout.strip() == "", ended
