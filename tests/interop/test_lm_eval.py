"""lm-evaluation-harness runs on an export by its own transformers class, on tasks of local files,
and its numbers are those that the run's model gives one text at a time."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lm_eval_tasks import ROWS, check_samples, write_tasks

import diffllm
from diffllm.tools import main

pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers", "5")
pytestmark = pytest.mark.slow


def samples(directory: Path, task: str) -> list[dict]:
    (file,) = directory.rglob(f"samples_{task}_*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["doc_id"])


@pytest.mark.parametrize("variant", ["diff_v2", "standard"])
def test_numbers_are_those_of_single_texts(
    make_run: Callable[..., Path], tmp_path: Path, variant: str
) -> None:
    run = make_run("run", f"attention={variant}")
    assert main(["export", f"run={run}", f"out={tmp_path / 'hf'}"]) == 0
    write_tasks(tmp_path / "tasks")
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args",
        f"pretrained={tmp_path / 'hf'},trust_remote_code=True,dtype=float32,max_length=288",
        "--include_path", str(tmp_path / "tasks"), "--tasks", "choices,texts,continued",
        "--device", "cpu", "--batch_size", "4", "--output_path", str(tmp_path / "out"),
        "--log_samples",
    ]  # fmt: skip
    more = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **more}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    model, tokenizer = diffllm.load_model(run)
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    found = {task: samples(tmp_path / "out", task) for task in ROWS}
    check_samples(found, model, tokenizer, fast)
