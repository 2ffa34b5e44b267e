"""docs/format.md against a dump that was just recorded: a reader written from that page alone.

No code of backtape reads here: json, numpy, ml_dtypes, xxhash and blake3.
"""

import json
import re
from pathlib import Path

import blake3
import ml_dtypes
import numpy as np
import pytest
import xxhash

import backtape

PAGE = Path(__file__).resolve().parents[2] / "docs/format.md"
DTYPES = {
    "bool": np.bool_, "u8": np.uint8, "i8": np.int8, "u16": np.uint16, "i16": np.int16, "u32": np.uint32,
    "i32": np.int32, "u64": np.uint64, "i64": np.int64, "f8e4m3": ml_dtypes.float8_e4m3fn,
    "f8e5m2": ml_dtypes.float8_e5m2, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32,
    "f64": np.float64,
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run of two ranks: every dtype, cut tensors, a replica, an addend, microbatches, no dimensions."""
    run = tmp_path_factory.mktemp("format") / "run-a"
    rng = np.random.default_rng(5)
    tensors = {f"t_{name}": rng.integers(0, 2, (4, 3)).astype(kind) for name, kind in DTYPES.items()}
    settings = {"dir": run, "world_size": 2, "mesh": {"data": 2}, "strict": True}
    recorders = [backtape.Recorder(rank=rank, **settings) for rank in range(2)]
    for rank, recorder in enumerate(recorders):
        with recorder.step(0) as tape:
            tape.head(loss="softmax_xent")
            for name, array in tensors.items():
                tape.record(name, array[2 * rank : 2 * rank + 2], global_shape=(4, 3), offsets=(2 * rank, 0))
            tape.record("q", np.full((2, 2), rank, np.float32), microbatch=rank, partial="sum", when="pre_reduce")
            tape.record("grad_norm", np.float64(2.5))
        recorder.scalars(0, loss=1.5, grad_norm=float("nan"))
    for recorder in reversed(recorders):
        recorder.close()
    return run, tensors


def canonical(value):
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def read_manifest(step):
    line = (step / "manifest.json").read_bytes()
    found = re.fullmatch(rb'\{"blake3":"([0-9a-f]{64})","manifest":(.*)\}\n', line, re.DOTALL)
    assert found and blake3.blake3(found[2]).hexdigest() == found[1].decode()
    manifest = json.loads(found[2])
    # Floats may be spelled in other ways than Python's; none is in what a file record holds.
    assert canonical(manifest["files"]).encode() in found[2]
    return manifest


def read_file(path):
    """What a file says of itself, the header's hash, and each shard's bytes."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    assert begin % 4096 == 0 and list(header["__metadata__"]) == ["backtape"]
    about = json.loads(header["__metadata__"]["backtape"])
    pieces, end = [], begin
    for record in about["shards"]:
        entry = header[record["entry"]]
        low, high = (begin + offset for offset in entry["data_offsets"])
        assert low == end and entry["shape"] == [b - a for a, b in record["box"]]
        pieces.append(data[low:high])
        end = high
    assert end == len(data)
    return about, blake3.blake3(data[:begin]).hexdigest(), pieces


def fmix(x):
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def fingerprint(data, dtype, box):
    width = np.dtype(dtype).itemsize
    extent = [b - a for a, b in box]
    if width == 8:
        box, extent, width = [*box, [0, 2]], [*extent, 2], 4
    words = np.frombuffer(data, {1: np.uint8, 2: np.uint16, 4: np.uint32}[width]).astype(np.uint32).reshape(extent)
    h = np.full(extent, 0x9747B28C, np.uint32)
    with np.errstate(over="ignore"):
        for dim, (low, high) in enumerate(box):
            index = np.arange(low, high, dtype=np.uint32).reshape([-1] + [1] * (len(box) - dim - 1))
            h = fmix(h + (index + np.uint32(1)) * np.uint32(0x9E3779B1))
        a = fmix(h ^ (words * np.uint32(0x85EBCA77)))
        b = fmix(a ^ np.uint32(0xC2B2AE3D))
    return [int(lane.sum(dtype=np.uint64) % 2**32) for lane in (a, b)]


def test_the_manifest_lists_every_file_and_every_hash_is_right(written):
    run, _ = written
    step = run / "step-00000000"
    manifest = read_manifest(step)
    assert (manifest["format_version"], manifest["run"], manifest["mesh"]) == (1, "run-a", [["data", 2]])
    names = [file["name"] for file in manifest["files"]]
    assert sorted(names) == sorted(path.name for path in step.glob("*.safetensors"))
    assert "rank-00001-mb-0001.safetensors" in names
    for file in manifest["files"]:
        about, header_hash, pieces = read_file(step / file["name"])
        assert header_hash == file["header_hash"] and about["shards"] == file["shards"]
        assert (step / file["name"]).stat().st_size == file["length"]
        for record, data in zip(about["shards"], pieces, strict=True):
            assert len(data) == record["length"]
            assert xxhash.xxh3_128_hexdigest(data) == record["hash"]
            assert fingerprint(data, DTYPES[record["dtype"]], record["box"]) == record["fingerprint"], record


def test_the_boxes_make_up_the_tensors_bit_for_bit(written):
    run, tensors = written
    step, found = run / "step-00000000", {}
    for file in read_manifest(step)["files"]:
        about, _, pieces = read_file(step / file["name"])
        for record, data in zip(about["shards"], pieces, strict=True):
            if record["tensor"].startswith("t_"):
                whole = found.setdefault(record["tensor"], np.zeros(record["shape"], DTYPES[record["dtype"]]))
                place = tuple(slice(low, high) for low, high in record["box"])
                whole[place] = np.frombuffer(data, whole.dtype).reshape(whole[place].shape)
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in tensors.items()
    }


def test_run_json_is_sealed(written):
    record = json.loads((written[0] / "run.json").read_text())
    seal = record.pop("blake3")
    assert blake3.blake3(canonical(record).encode()).hexdigest() == seal
    assert (record["format_version"], record["world_size"]) == (1, 2)


def test_the_journal_is_a_chain(written):
    before = xxhash.xxh3_128_hexdigest(b"backtape journal 1")
    lines = (written[0] / "journal.jsonl").read_bytes().splitlines()
    for line in lines:
        checksum, text = line.split(b" ", 1)
        before = xxhash.xxh3_128_hexdigest(before.encode() + text)
        assert checksum.decode() == before
        assert set(json.loads(text)) == {"at_ms", "events"}
    assert lines


def test_scalars_are_lines_of_json(written):
    head, row = (json.loads(line) for line in (written[0] / "scalars/rank-00001.jsonl").read_text().splitlines())
    assert head["schema"] == "backtape.scalars/1" and head["rank"] == 1
    assert row["step"] == 0 and row["values"] == {"loss": 1.5, "grad_norm": "NaN"}


def test_every_field_of_a_record_is_on_the_page_and_none_that_is_not(written):
    table = PAGE.read_text().split("### A shard record")[1].split("###")[0]
    described = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    records = [
        record
        for file in read_manifest(written[0] / "step-00000000")["files"]
        for record in file["shards"]
    ]
    assert {field for record in records for field in record} == described - {"compiled"}
