"""Writes what trainers read by paths: `saved.py DIRECTORY`.

    model/      a tiny model with its tokenizer, as transformers saves them
    text.txt    sentences, one a line
    rows/       the same as a data set of Hugging Face
    nanogpt/    numbers of tokens, as nanoGPT reads them
"""

import json
import pickle
import random
import struct
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "python/tests_frameworks"))

import tiny  # noqa: E402

directory = Path(sys.argv[1])
tiny.model().save_pretrained(directory / "model")
tiny.tokenizer(model_max_length=64).save_pretrained(directory / "model")
lines = [row["text"] for row in tiny.sentences({"text": (20, 40)}, count=200)]
(directory / "text.txt").write_text("\n".join(lines) + "\n")
(directory / "rows").mkdir()
(directory / "rows/rows.json").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
(directory / "nanogpt").mkdir()
chance, count, vocabulary = random.Random(0), 20_000, 200
for split in ("train", "val"):
    tokens = [chance.randrange(vocabulary) for _ in range(count)]
    (directory / f"nanogpt/{split}.bin").write_bytes(struct.pack(f"<{count}H", *tokens))
(directory / "nanogpt/meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocabulary}))
