"""benchmarks/golden.py: equal runs compare equal, and every kind of difference is detected."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from runs.json_files import read_json, write_json

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from golden import compare, run_cases

ROOT, CASE = Path(__file__).parents[2], ["replicas"]


@pytest.mark.slow
def test_golden_comparison_fails_if_any_output_file_differs(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    run_cases(ROOT, before, CASE)
    shutil.copytree(before, after)
    assert compare(before, after, CASE)

    metrics = after / "replicas" / "metrics.jsonl"
    unchanged = metrics.read_text(encoding="utf-8")
    first, *others = unchanged.splitlines()
    line = json.loads(first)
    line["train/loss"] += 1e-6
    metrics.write_text("\n".join([json.dumps(line), *others]), encoding="utf-8")
    assert not compare(before, after, CASE)
    metrics.write_text(unchanged, encoding="utf-8")

    trace = after / "trace-replicas-0-1.json"
    found = read_json(trace)
    found["entries"].reverse()
    write_json(trace, found)
    assert not compare(before, after, CASE)
    shutil.copy(before / trace.name, trace)

    (shard,) = (after / "replicas/checkpoints/step-00000006").glob("__0_*.distcp")
    content = bytearray(shard.read_bytes())
    weights = content.index(b"data/0") + 2**12
    content[weights] ^= 1
    shard.write_bytes(content)
    assert not compare(before, after, CASE)
