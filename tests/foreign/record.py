"""Runs one head in a process of its own and records its step: what run.py starts.

    python -m foreign.record CASE ROOT OUT SEED DTYPE
"""

import sys
from pathlib import Path

import backtape
from foreign.case import CASES
from foreign.drawn import draw


def main(id, root, out, seed, dtype):
    import foreign.jax_heads

    if id not in CASES:
        import foreign.torch_heads  # noqa: F401
    case = CASES[id]
    named = case.head(Path(root), draw(int(seed), case.ignored, case.multiple), dtype, **case.arguments)
    recorder = backtape.Recorder(out, strict=True)
    with recorder.step(0) as tape:
        tape.head(**case.declared)
        for name, array in named.items():
            how = {"when": "pre_reduce"} if name == "dk" else {}
            tape.record(name, array, microbatch=None if name == "k" else 0, **how)
    recorder.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
