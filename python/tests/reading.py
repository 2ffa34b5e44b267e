"""Reads a dump back with no code of backtape: json and safetensors only."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open

SAFETENSORS_NAMES = {
    "bool": "BOOL", "u8": "U8", "i8": "I8", "u16": "U16", "i16": "I16", "u32": "U32", "i32": "I32",
    "u64": "U64", "i64": "I64", "f8e4m3": "F8_E4M3", "f8e5m2": "F8_E5M2", "f16": "F16",
    "bf16": "BF16", "f32": "F32", "f64": "F64",
}  # fmt: skip


@dataclass
class Entry:
    """One shard of the manifest and the bytes that its file holds for it."""

    record: dict
    data: bytes

    def array(self, dtype):
        extent = [hi - lo for lo, hi in self.record["box"]]
        return np.frombuffer(self.data, np.uint8).view(dtype).reshape(extent)


def manifest(run, step=0):
    return json.loads((Path(run) / f"step-{step:08}" / "manifest.json").read_text())["manifest"]


def entries(run, step=0):
    """Every shard of a committed step, in the manifest's order."""
    found = []
    for file in manifest(run, step)["files"]:
        path = Path(run) / f"step-{step:08}" / file["name"]
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        with safe_open(path, framework="numpy") as opened:
            assert set(opened.keys()) == {shard["entry"] for shard in file["shards"]}
        for shard in file["shards"]:
            about = header[shard["entry"]]
            assert about["dtype"] == SAFETENSORS_NAMES[shard["dtype"]]
            assert about["shape"] == [hi - lo for lo, hi in shard["box"]]
            start, end = (8 + length + offset for offset in about["data_offsets"])
            found.append(Entry(shard, raw[start:end]))
    return found


def only(run, tensor, step=0):
    """The one shard of a tensor."""
    (entry,) = [entry for entry in entries(run, step) if entry.record["tensor"] == tensor]
    return entry


def omissions(run, step=0):
    return [(omitted["tensor"], omitted["reason"]) for omitted in manifest(run, step)["omissions"]]
