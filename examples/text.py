"""The text that the examples train on: the source of Python's standard library on this machine.

Nothing is downloaded and nothing is random, so every rank builds the same vocabulary and the same
batches by itself. Code has the label distribution that real corpora have (a single space is about
a quarter of all tokens), which is what makes a low-precision label gradient visible.

Needs numpy only, so that examples in other frameworks can use it too.
"""

import collections
import os
import random
import re
import sysconfig
from dataclasses import dataclass

import numpy as np

# An identifier, one digit, a line break with the next line's indent, a run of spaces, or any one
# character: together they match every text, so no input can fall between two pieces.
PIECE = re.compile(r"[^\W\d]\w*|\d|\n *| +|.", re.DOTALL)

# Strings are matched only so that a `#` inside one does not start a comment.
STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|' + r"'''(?:\\.|[^\\])*?'''|"
    r'"(?:\\.|[^"\\\n])*"|' + r"'(?:\\.|[^'\\\n])*'|"
    r"(?P<comment>#[^\n]*)",
    re.DOTALL,
)

# Left out because they repeat the same boilerplate or are not part of the library proper.
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}

END_OF_FILE = 256  # ids 0..255 are the bytes, so that no text is unknown
FIRST_PIECE = 257


def library_sources():
    """The library's .py files as a list of strings, in an order fixed by their paths."""
    root = sysconfig.get_path("stdlib")
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        paths += [os.path.join(folder, name) for name in sorted(files) if name.endswith(".py")]
    texts = []
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as file:
            texts.append(file.read())
    # Neighbouring files resemble each other; the shuffle mixes them, the same way on every rank.
    random.Random(0).shuffle(texts)
    return texts


class Vocabulary:
    """Bytes, one end-of-file token, and the most frequent pieces of a corpus."""

    def __init__(self, texts, size):
        """Learn `size` entries from `texts`; a few seconds for the whole standard library."""
        counts = collections.Counter()
        for text in texts:
            counts.update(PIECE.findall(text))
        # Ties are broken by the piece itself: Counter order would depend on the order of the files.
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        self.ids = {p: FIRST_PIECE + i for i, (p, _) in enumerate(ranked[: size - FIRST_PIECE])}
        self.size = FIRST_PIECE + len(self.ids)

    def encode_file(self, text):
        """Token ids and loss weights of one file, both ending in the end-of-file token.

        The weight is 0 for tokens of a comment (the model is to write code, not remarks) and for
        the first token of the file, which nothing before it predicts.
        """
        comments = [m.span() for m in STRING_OR_COMMENT.finditer(text) if m["comment"]]
        commented = np.zeros(len(text) + 1, bool)
        for begin, end in comments:
            commented[begin:end] = True
        ids, weights = [], []
        for match in PIECE.finditer(text):
            piece = self.ids.get(match[0])
            new = list(match[0].encode()) if piece is None else [piece]
            ids += new
            weights += [0.0 if commented[match.start()] else 1.0] * len(new)
        if weights:
            weights[0] = 0.0
        return ids + [END_OF_FILE], weights + [1.0]


@dataclass(frozen=True)
class Batch:
    """What one optimizer step reads: [microbatches, rows, length] each."""

    tokens: np.ndarray  # int32, the inputs
    labels: np.ndarray  # int32, the next token: already shifted
    weights: np.ndarray  # float32, the weight of each label in the loss


class Stream:
    """All files as one endless row of tokens, cut into batches."""

    def __init__(self, vocabulary, texts, needed):
        """Encode files until there are `needed` tokens and one more, or no files are left."""
        ids, weights = [], []
        for text in texts:
            more_ids, more_weights = vocabulary.encode_file(text)
            ids += more_ids
            weights += more_weights
            if len(ids) > needed:
                break
        self.ids = np.array(ids, np.int32)
        self.weights = np.array(weights, np.float32)

    def batch(self, step, microbatches, rows, length):
        """The global batch of `step`; every rank builds it whole and keeps its own rows."""
        shape = (microbatches, rows, length)
        first = step * microbatches * rows * length
        at = first + np.arange(microbatches * rows * length)
        now, following = at % len(self.ids), (at + 1) % len(self.ids)
        return Batch(
            self.ids[now].reshape(shape),
            self.ids[following].reshape(shape),
            self.weights[following].reshape(shape),
        )
