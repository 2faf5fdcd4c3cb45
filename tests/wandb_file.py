"""Reading back what wandb wrote for an offline run."""

import json
import struct
from pathlib import Path
from typing import Any

from processes import wait_until
from wandb.proto.wandb_internal_pb2 import MetricRecord, Record, RunRecord

BLOCK = 32768


class OfflineRun:
    """The records of the one run below a run directory, as plain values."""

    def __init__(self, directory: Path):
        (self.path,) = directory.glob("wandb/offline-run-*/*.wandb")
        self.records = complete_records(self.path)

    def of_kind(self, kind: str) -> list[Any]:
        return [getattr(r, kind) for r in self.records if r.WhichOneof("record_type") == kind]

    @property
    def header(self) -> RunRecord:
        (header,) = self.of_kind("run")
        return header

    @property
    def config(self) -> dict[str, Any]:
        return {u.key: json.loads(u.value_json) for u in self.header.config.update}

    @property
    def metrics(self) -> dict[str, MetricRecord]:
        """Definitions by name or glob."""
        return {m.glob_name or m.name: m for m in self.of_kind("metric")}

    @property
    def history(self) -> list[dict[str, Any]]:
        """Logged rows without what wandb adds."""
        rows = [items(record.item) for record in self.of_kind("history")]
        return [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for record in self.of_kind("summary"):
            found |= items(record.update)
        return found


def items(record: Any) -> dict[str, Any]:
    return {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record}


def read_records(path: Path) -> list[Record]:
    """A 7-byte header, then LevelDB's log format: blocks of records with 7-byte headers."""
    data, at, buffer, found = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:  # a block's end that no header fits into
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + size > len(data):
            break  # wandb's service is still writing this record
        buffer += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or last part
            found.append(Record.FromString(buffer))
            buffer = b""
    return found


def complete_records(path: Path) -> list[Record]:
    """All records; wandb's service may still be writing after finish()."""
    found: list[Record] = []

    def complete() -> bool:
        found[:] = read_records(path) if path.stat().st_size else []
        return bool(found) and found[-1].WhichOneof("record_type") == "exit"

    wait_until(complete, f"exit record in {path}")
    return found


def covers(pattern: str, name: str) -> bool:
    """Whether a name of the table, or one with a `*` at its end, stands for this metric."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def examples(pattern: str) -> list[str]:
    """Names that a line of the table of names stands for."""
    if pattern.endswith("_*"):
        return [pattern[:-1] + "00/layer_00", pattern[:-1] + "11/layer_31"]
    if pattern == "grad_norm/*":
        return ["grad_norm/embedding", "grad_norm/lambda"]
    return [pattern[:-1] + "layer_00", pattern[:-1] + "layer_31"] if "*" in pattern else [pattern]
