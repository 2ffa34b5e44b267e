"""The head as launches of GPU kernels over flat memory, emulated in numpy.

One block of `code.tile` threads works on one token's row of logits; buffers come from a pool that
is never cleared, as a caching allocator's are. Sums are f32. `code.twist` names what is wrong in
the kernels, each a mistake that a public kernel had; None is right.
"""

import numpy as np

from corpus.job import DTYPES

# What the allocator hands out: the bytes of whoever had them before.
POISON = np.frombuffer(b"\xcd\xcd\xcd\xbd", np.float32)[0]


def pool(shape, stale=None):
    """A buffer that nobody cleared: the last step's values where they fit, else a pattern."""
    buffer = np.full(shape, POISON, np.float32)
    if stale is not None:
        buffer[...] = stale
    return buffer


def run(job, code, data, weights, denominators):
    """(values over all tokens, addends of each rank) of one microbatch."""
    forward, addends = [], {}
    for rank in range(job.ranks):
        rows = job.rows(rank)
        own = {name: array[rows] for name, array in data.items()}
        found, sums = one_rank(job, code, own, weights[rows], denominators[rank])
        forward.append(found)
        for name, value in sums.items():
            addends.setdefault(name, []).append(value)
    joined = {n: np.concatenate([one[n] for one in forward]) for n in forward[0] if n != "loss"}
    joined["loss"] = np.float32(sum(one["loss"] for one in forward))
    return joined, addends


def raw_logits(job, q):
    k = job.k.astype(np.float32)
    raw = q.astype(np.float32) @ k.T
    return raw if job.bias is None else raw + job.bias


def one_rank(job, code, data, weights, denominator):
    o, twist = job.options, code.twist
    q, labels = data["q"], data["labels"].astype(np.int64)
    read = q
    if twist == "stride ignored":
        # q is a view that leaves out the last position of every row of a longer buffer; the
        # kernel takes the rows of the buffer one after the other.
        read = unsliced(q, job.sequence or 7)[: len(q)]
    raw = raw_logits(job, read) / np.float32(o.temperature)
    z = raw if not o.softcap else np.float32(o.softcap) * np.tanh(raw / np.float32(o.softcap))
    if o.valid_vocab is not None:
        z = z.copy()
        z[:, o.valid_vocab :] = -np.inf if o.mask_value is None else o.mask_value
    lse = row_lse(z, code)
    counts = (labels >= 0) & (labels < job.vocab)
    own = label_logits(z, labels, counts, code)
    losses = lse - own + np.float32(o.z_loss) * lse**2
    weights = np.where(counts, weights, 0).astype(np.float32)
    used = weights != 0
    loss = np.float32(np.sum(np.where(used, weights * losses, 0), dtype=np.float32) / np.float32(denominator))
    g = (np.float32(o.cotangent) * weights / np.float32(denominator)).astype(np.float32)
    seen = z
    if twist == "second backward":
        # The first backward of this graph wrote the gradients over the logits.
        seen = gradients(o, code, z, lse, labels, counts, g, raw)
        lse = row_lse(seen, code)
    d = gradients(o, code, seen, lse, labels, counts, g, raw)
    shown = d if twist == "gradients over logits" else z
    found = {"lse": lse, "label_logits": own, "loss": loss, "logits": shown.astype(np.float32), "dlogits": d}
    if twist == "second backward":
        found["lse"] = row_lse(z, code)
    dq, sums = products(job, code, d, q, used)
    return found | dq, sums


def row_lse(z, code):
    """log-sum-exp of every row by one block."""
    if code.twist == "vocabulary above the block":
        z = z[:, : code.tile]
    if code.twist == "columns not masked":
        # The block rounds the row up: the threads beyond it read the next row.
        more = -z.shape[1] % code.tile
        after = np.concatenate([z[1:, :more], np.zeros((1, more), np.float32)])
        z = np.concatenate([z, after], 1)
    top = z.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    return (top + np.log(np.exp(z - top).sum(-1, dtype=np.float32, keepdims=True)))[:, 0].astype(np.float32)


def label_logits(z, labels, counts, code):
    safe = np.where(counts, labels, 0)
    at = np.arange(labels.size)
    if code.twist == "one-hot product":
        onehot = (np.arange(z.shape[1]) == safe[:, None]).astype(np.float32)
        with np.errstate(invalid="ignore"):
            return (onehot * z).sum(-1, dtype=np.float32)
    if code.twist == "narrow index":
        return z.reshape(-1)[wrapped(at * z.shape[1] + safe, code) % z.size]
    return z[at, safe]


def wrapped(index, code):
    """A flat index as a signed integer of `code.chunk` bits holds it."""
    half = 1 << (code.chunk - 1)
    return (index + half) % (2 * half) - half


def gradients(o, code, z, lse, labels, counts, g, raw):
    """dlogits [T, V] as the kernel leaves them in their buffer."""
    with np.errstate(over="ignore", invalid="ignore"):
        p = np.exp(z - lse[:, None])
    rows, vocab = z.shape
    scale = g[:, None] * (1 + 2 * np.float32(o.z_loss) * lse)[:, None]
    d = np.where(g[:, None] != 0, scale * p, 0).astype(np.float32)
    at = np.arange(rows)
    index = at * vocab + labels
    if code.twist == "target not checked":
        # The row's thread 0 takes g off at its label, wherever that is: g is that of a counted token.
        full = np.where(counts, g, np.max(np.abs(g)) * np.sign(o.cotangent))
        flat = d.reshape(-1)
        inside = (index >= 0) & (index < flat.size)
        np.subtract.at(flat, index[inside], full[inside])
    elif code.twist == "narrow index":
        np.subtract.at(d.reshape(-1), wrapped(index[counts], code) % d.size, g[counts])
    else:
        d[at[counts], labels[counts]] -= g[counts]
    if o.softcap:
        d *= 1 - np.where(np.isfinite(z) & (np.abs(z) <= o.softcap), z / np.float32(o.softcap), 0) ** 2
    d /= np.float32(o.temperature)
    if o.valid_vocab is not None:
        d[:, o.valid_vocab :] = 0
    if code.twist == "vocabulary above the block":
        # Columns beyond the block are never written: the buffer keeps what it had.
        buffer = pool(d.shape, np.roll(d, 1, axis=0))
        buffer[:, : code.tile] = d[:, : code.tile]
        d = buffer
    if code.twist == "rows not written":
        buffer = pool(d.shape, np.roll(d, 3, axis=0))
        buffer[g != 0] = d[g != 0]
        d = buffer
    return d


def products(job, code, d, q, used):
    """dq and dk in their dtype: of the narrowed dlogits, sums in f32."""
    narrow, twist = DTYPES[job.dtype], code.twist
    d = d.astype(narrow).astype(np.float32)
    dq, dk = d @ job.k.astype(np.float32), d.T @ q.astype(np.float32)
    if twist == "dq rows not written":
        buffer = pool(dq.shape)
        buffer[used] = dq[used]
        dq = buffer
    if twist == "last tile not written":
        buffer = pool(dk.shape, np.roll(dk, 5, axis=0) if code.chunk % 2 else None)
        whole = dk.shape[0] // code.tile * code.tile
        buffer[:whole] = dk[:whole]
        dk = buffer
    if twist == "added to stale":
        dk = dk + np.roll(dk, 11, axis=0)
    sums = {"dk": dk.astype(narrow)}
    if job.bias is not None:
        sums["dbias"] = d.sum(0, dtype=np.float32)
    return {"dq": dq.astype(narrow)}, sums


def unsliced(q, row):
    """The buffer of which q is `buffer[:, :-1]`, flat: one more position after every `row`."""
    out = []
    for start in range(0, len(q), row):
        out += [q[start : start + row], q[start : start + 1]]
    return np.concatenate(out)
