"""Reader of the file that wandb writes for an offline run."""

import json
import struct
from pathlib import Path
from typing import Any

from processes import wait_until
from wandb.proto.wandb_internal_pb2 import MetricRecord, Record, RunRecord

BLOCK = 32768


class OfflineRun:
    """Records of the single wandb run in a run directory, as plain values."""

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
        """Metric definitions by name or glob."""
        return {m.glob_name or m.name: m for m in self.of_kind("metric")}

    @property
    def history(self) -> list[dict[str, Any]]:
        """Logged rows without the keys that wandb adds."""
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
    """Read a 7-byte header, then LevelDB's log format: blocks of records with 7-byte headers."""
    data, at, buffer, found = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:  # the rest of a block is too short for a header
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
    """Return all records; wait for wandb's service, which may still write after finish()."""
    found: list[Record] = []

    def complete() -> bool:
        found[:] = read_records(path) if path.stat().st_size else []
        return bool(found) and found[-1].WhichOneof("record_type") == "exit"

    wait_until(complete, f"exit record in {path}")
    return found


def covers(pattern: str, name: str) -> bool:
    """Return whether a metric matches a name in the table, which may end with `*`."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def examples(pattern: str) -> list[str]:
    """Return example metrics that match a name in the table."""
    if pattern.endswith("_*"):
        return [pattern[:-1] + "00/layer_00", pattern[:-1] + "11/layer_31"]
    if pattern == "grad_norm/*":
        return ["grad_norm/embedding", "grad_norm/lambda"]
    return [pattern[:-1] + "layer_00", pattern[:-1] + "layer_31"] if "*" in pattern else [pattern]
