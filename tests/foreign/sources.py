"""Source files of public repositories at given commits.

The repositories are got from outside and are no part of this one: `--sources DIR` is a folder that
holds a git directory of each, as `owner/name`, `owner+name`, `name`, or one of these with `/repo`.
"""

import ast
import importlib.util
import subprocess
import sys
import tarfile
import types
from io import BytesIO
from pathlib import Path


class NoSource(Exception):
    """A repository or a commit that is not below --sources."""


def git_directory(sources, repository):
    owner, name = repository.split("/")
    for folder in (f"{owner}/{name}", f"{owner}+{name}", name):
        for path in (sources / folder, sources / folder / "repo"):
            if subprocess.run(["git", "-C", path, "rev-parse", "HEAD"], capture_output=True).returncode == 0:
                return path
    raise NoSource(f"{repository} is not below {sources}: clone it there")


def extract(sources, repository, commit, into):
    """Writes the files of a commit into a folder."""
    # Its programs alone: snapshots may lack large files.
    archive = ["git", "-C", git_directory(sources, repository), "archive", commit, "--", ":(glob)**/*.py"]
    done = subprocess.run(archive, capture_output=True)
    if done.returncode != 0:
        raise NoSource(f"{repository} has no commit {commit} here: {done.stderr.decode().splitlines()[0]}")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as files:
        files.extractall(into, filter="tar")
    return Path(into)


def functions(root, path, *names, **known):
    """Functions and classes of one file, by name, without the rest of their program.

    `known`: what their bodies refer to of that rest (imports, neighbours). The result has no names
    that begin with `?`: helpers that only some versions have.
    """
    text, scope = (root / path).read_text(), dict(known)
    wanted = {name.removeprefix("?") for name in names}
    for node in ast.parse(text).body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        body = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
        rule = any(f"{name}.def{way}(" in body for name in wanted for way in ("vjp", "jvp"))
        if getattr(node, "name", None) in wanted or (isinstance(node, ast.Expr) and rule):
            # The source's own line numbers, so that inspect and tracebacks find them.
            exec(compile("\n" * (first - 1) + body, str(root / path), "exec", dont_inherit=True), scope)
    missing = [name for name in names if name not in scope and not name.startswith("?")]
    if missing:
        raise NoSource(f"{path} has no {', '.join(missing)}")
    found = [scope[name] for name in names if not name.startswith("?")]
    return found[0] if len(found) == 1 else found


def module(root, path, **absent):
    """One file as a module. `absent`: modules of its program that its head does not use, by what they offer."""
    for name, offered in absent.items():
        vars(package(name.replace("__", "."))).update(offered)
    name = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    package(name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, root / path)
    loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def package(name):
    """An empty package of that name, and those around it, where there is none yet."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        outer = ".".join(parts[:depth])
        if outer not in sys.modules:
            sys.modules[outer] = types.ModuleType(outer)
            sys.modules[outer].__path__ = []
    return sys.modules[name]
