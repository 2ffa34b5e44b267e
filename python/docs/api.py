"""Writes docs/api.md from the docstrings: `python python/docs/api.py` after a change of either.

Signatures, docstrings and the notes below attributes of everything public, in the order in which
people meet it. It reads the sources and imports nothing, so torch need not be there. A test keeps
the page equal to what this makes.
"""

import ast
import inspect
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/api.md"

# Heading, module, file, public names; the module's own docstring stands first where the last is True.
PARTS = [
    ("Recording", "backtape", "recorder.py", ["Recorder"], False),
    ("", "backtape", "tape.py", ["Tape"], False),
    ("", "backtape", "_native.pyi", ["Summary", "RecorderError"], False),
    ("After the job", "backtape", "postmortem.py", ["open", "replay", "checks", "trajectory"], False),
    ("", "backtape", "run.py", ["Run", "Step"], False),
    ("", "backtape", "report.py", ["Report"], False),
    ("Functions of your own in a replay", "backtape.variants", "variants.py", ["Unit"], True),
    ("Taps in jax", "backtape.jax", "jax.py", ["tap", "tap_grad", "wait_for_taps"], True),
    ("", "backtape.jax", "attach_jax/__init__.py", ["attach"], False),
    ("", "backtape.jax", "attach_jax/session.py", ["Attached"], False),
    ("", "backtape.jax.losses", "attach_jax/losses.py",
     ["softmax_cross_entropy_with_integer_labels", "softmax_cross_entropy", "linear_cross_entropy"], False),
    ("The step in jax", "backtape.jax", "step_jax.py", ["step_algebra"], True),
    ("PyTorch", "backtape.torch", "torch.py",
     ["tap", "tap_grad", "gradients", "record_parameters", "record_gradients"], True),
    ("", "backtape.torch", "attach_torch/__init__.py", ["attach"], False),
    ("", "backtape.torch", "attach_torch/session.py", ["Attachment"], False),
    ("", "backtape.torch", "step_torch/__init__.py", ["step_algebra", "StepAlgebra"], False),
    ("Callbacks for trainers", "backtape.transformers", "transformers.py", ["BacktapeCallback"], False),
    ("", "backtape.lightning", "lightning.py", ["BacktapeCallback"], False),
    ("A rule of your own", "backtape.rule", "rule.py",
     ["sqrt", "abs", "sign", "exp", "log", "tanh", "maximum", "minimum", "where"], True),
    ("Scalars", "backtape.scalars", "scalars.py", ["of_torch", "of_jax"], True),
    ("What works here", "backtape.doctor", "doctor.py", ["examine", "Line"], True),
    ("Types", "backtape.typing", "typing.py", ["AnyArray", "Float64Array", "Place", "When"], True),
]  # fmt: skip

HEAD = """\
# The Python API

Made from the docstrings by `python python/docs/api.py`; a test keeps it so. All of it is typed (`py.typed`), and
importing backtape imports neither jax nor torch. Shapes are in brackets: T tokens, D the width of the hidden state, V
classes of the vocabulary, padding included.
"""

# Between the modules of backtape, not for jobs.
INTERNAL = {
    "record_plain", "record_shards", "record_compiled", "leave_out", "expect", "arrived", "guarded",
    "keys_of", "at_end", "rank", "mesh",
    "on_train_begin", "on_train_start", "on_train_end", "on_train_failed", "on_exception",
}  # fmt: skip

# Marks a call that only its owner makes: what `open` gives is made by it.
MADE_BY_OTHERS = {
    "Run", "Step", "Report", "Tape", "Summary", "RecorderError", "Unit", "Line", "StepAlgebra", "Attached",
}  # fmt: skip


def signature(name, node):
    """As it is written in the source; one parameter a line where it is long."""
    arguments = node.args
    for group in (arguments.posonlyargs, arguments.args):
        group[:] = [one for one in group if one.arg not in ("self", "cls")]
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    text = f"{name}({ast.unparse(arguments)}){returned}"
    if len(text) <= 100:
        return text
    depth, words, word = 0, [], ""
    for letter in ast.unparse(arguments):
        depth += {"[": 1, "(": 1, "{": 1, "]": -1, ")": -1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            words, word = [*words, word], ""
        else:
            word += letter
    lines = [f"    {one.strip()}," for one in [*words, word]]
    return "\n".join([f"{name}(", *lines, f"){returned}"])


def prose(text):
    """A docstring as Markdown: indented examples and lists of parameters keep their lines."""
    found = []
    for paragraph in re.split(r"\n\n+", inspect.cleandoc(text)):
        lines = paragraph.split("\n")
        if all(line.startswith("    ") for line in lines):
            found.append("```python\n" + textwrap.dedent(paragraph) + "\n```")
            continue
        joined = []
        for line in lines:
            # Not a sentence that goes on with a colon in it.
            starts = re.match(r"\w+(, \w+)*: ", line) and not (joined and joined[-1] and joined[-1][-1] not in ".:;)")
            if starts and (joined or len(lines) > 1):
                joined.append("- " + re.sub(r"^(\w+(?:, \w+)*): ", lambda m: f"`{m[1]}`: ", line))
            elif re.match(r"(Raises|Returns) ", line) and joined:
                joined += ["", line]
            elif joined and joined[-1] and (line.startswith(" ") or joined[-1].startswith("- ")):
                joined[-1] += " " + line.strip()
            else:
                joined.append(line.strip())
        text = "\n".join(joined)
        found.append(re.sub(r"(?<!\n)\n- ", "\n- ", text))
    return "\n\n".join(found)


def attributes(cls):
    """Public attributes with their types and the note below each."""
    found = []
    for node, after in zip(cls.body, [*cls.body[1:], None]):
        if isinstance(node, ast.AnnAssign) and not node.target.id.startswith("_"):
            noted = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            note = " ".join(inspect.cleandoc(after.value.value).split()) if noted else ""
            words = f"- `{node.target.id}: {ast.unparse(node.annotation)}`"
            found.append(f"{words}: {note}" if note else words)
    return found


def method(cls, node):
    """A method or property of a class."""
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    name = f"{cls.name}.{node.name}"
    if "property" in marks:
        shown = f"{name}: {ast.unparse(node.returns)}" if node.returns else name
    else:
        shown = signature(name, node)
    return [f"#### {name}", "", "```python", shown, "```", "", prose(ast.get_docstring(node) or ""), ""]


def entry(module, node):
    """One public name as Markdown."""
    name = f"{module}.{node.name}"
    lines = [f"### {name}", ""]
    if isinstance(node, ast.FunctionDef):
        lines += ["```python", signature(name, node), "```", ""]
        return [*lines, prose(ast.get_docstring(node) or ""), ""]
    made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    if made and node.name not in MADE_BY_OTHERS:
        made[0].returns = None
        lines += ["```python", signature(name, made[0]), "```", ""]
    lines += [prose(ast.get_docstring(node) or ""), "", *attributes(node), ""]
    public = (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name not in INTERNAL)
    for one in public:
        if one.name.startswith("_"):
            continue
        lines += method(node, one)
    return lines


def alias(module, tree, name):
    """A name of a type, and the note below it."""
    for node, after in zip(tree.body, [*tree.body[1:], None]):
        if isinstance(node, ast.AnnAssign) and node.target.id == name:
            return [f"- `{module}.{name} = {ast.unparse(node.value)}`: {after.value.value}"]
    raise LookupError(f"{module} has no {name}")


def page():
    """The whole page."""
    lines = [HEAD]
    for title, module, file, names, introduced in PARTS:
        tree = ast.parse((ROOT / "python/backtape" / file).read_text(encoding="utf-8"))
        if title:
            lines += [f"## {title}", ""]
        if introduced:
            lines += [prose(ast.get_docstring(tree)), ""]
        known = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for name in names:
            lines += entry(module, known[name]) if name in known else alias(module, tree, name)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {len(page().splitlines())} lines")
