"""What is declared of a head that was found in a program: the options of `Tape.head`."""

from typing import Any

import jax

from backtape.attach_jax.finding import Found
from backtape.sources import ASSUMED, DTYPES, MEASURED, SEEN, Sourced, of_items

# The label of a token that the loss does not read.
UNREAD = -100

NAMES = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def options_of(found: Found) -> dict[str, Any]:
    """The head as options of `Tape.head`.

    What its loss is divided by is in the cotangent of each token, which is recorded.
    """
    (contracted, _) = found.product.params["dimension_numbers"]
    # A zero that was taken off is no number below it.
    known = {name: value for name, value in found.options.items() if name != "shift"}
    own = {name: value + 0.0 if isinstance(value, float) else value for name, value in known.items()}
    is_first = int(contracted[1 - found.q][0]) == 0
    return {
        "path": "plain" if found.fused is None else "fused",
        "reduction": "none",
        "scope": "rank",
        "microbatch_reduction": "sum",
        "ignore_label": UNREAD,
        "k_layout": "dv" if is_first else "vd",
        "dtypes": dtypes(found),
        "autocast": None,
        **own,
    }


def sourced(options: dict[str, Any]) -> Sourced:
    """The same with where each is from: the program has all of them, but for how ranks share tokens."""
    flowed = {DTYPES: options.get(DTYPES, {}), "cotangent": None, "microbatches": None}
    seen = dict.fromkeys((name for name in options if name != DTYPES), SEEN)
    assumed = dict.fromkeys(("scope", "microbatch_reduction"), ASSUMED)
    return Sourced(options, {**seen, **of_items(flowed, MEASURED), **assumed})


def dtypes(found: Found) -> dict[str, str]:
    """The points at which the program rounds, as docs/dtypes.md has them. What a compiler may leave out or put
    in is not declared."""
    q, k = (NAMES.get(str(value.dtype)) for value in found.product.inputs)
    made = NAMES.get(str(found.product.outputs[0].dtype))
    if q is None or k is None or made is None or q != k:
        return {}
    said = {"output": q, "accumulate": "f64" if q == "f64" else "f32"}
    narrowed = _narrowed(found) if q == "f32" else None
    if q in ("f32", "f64"):
        wide = {name: q for name in ("logits", "lse", "p", "dlogits")}
        return said | wide | {"input": narrowed or q}
    return said | {"input": q}


def _narrowed(found: Found) -> str | None:
    """The format that a product of f32 narrows its operands to on this machine."""
    precision = str(found.product.params.get("precision") or jax.config.jax_default_matmul_precision or "")
    if any(word in precision.lower() for word in ("highest", "float32", "f32_f32")):
        return None
    return {"gpu": "tf32", "tpu": "bf16"}.get(jax.default_backend())
