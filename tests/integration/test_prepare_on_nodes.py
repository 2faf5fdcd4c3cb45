"""diffllm prepare on nodes, through submitit on this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diffllm.data import TokenData

CORPUS = "".join(
    json.dumps({"text": " ".join(chr(97 + i * k % 26) * (k % 5 + 1) for k in range(i % 40 + 5))})
    + "\n"
    for i in range(3000)
)


def prepare(words: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diffllm", "prepare", "data.paths=corpus.jsonl", *words]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True)


@pytest.mark.slow
def test_nodes_prepare_as_one_does(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(CORPUS)
    words = ["data.vocab_size=290", f"data.cache_dir={tmp_path}/one"]
    one = prepare(words, tmp_path)
    assert one.returncode == 0, one.stderr
    launcher = ["hydra/launcher=submitit_local", "prepare.num_nodes=2", "prepare.processes=1"]
    words[1] = f"data.cache_dir={tmp_path}/two"
    two = prepare([*words, *launcher], tmp_path)
    assert two.returncode == 0, two.stderr
    assert "submitted 2 jobs" in two.stdout
    here, there = (
        TokenData(Path(next(line for line in result.stdout.splitlines() if "/tokens/" in line)))
        for result in (one, two)
    )
    assert here.manifest == there.manifest


@pytest.mark.slow
def test_nodes_that_fail_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text("no json\n" * 5)
    words = ["hydra/launcher=submitit_local", "prepare.num_nodes=2", "data.vocab_size=300"]
    result = prepare([*words, f"data.cache_dir={tmp_path}/cache"], tmp_path)
    assert result.returncode == 2
    assert "2 of 2 nodes did not finish (node 0: " in result.stderr
    assert "corpus.jsonl: line 1: JSON parse error" in result.stderr
    assert "Traceback" not in result.stderr


REFUSED = [
    (["prepare.node_rank=1"], "prepare.node_rank=1 has to be below prepare.num_nodes=1"),
    (["hydra/launcher=submitit_local", "hydra.launcher.nodes=2"], "have to be 1"),
    (["hydra/launcher=basic"], "hydra/launcher=basic submits nothing"),
    (["prepare.processes=0"], "prepare.processes=0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    REFUSED,
)
def test_nodes_that_there_are_not(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "corpus.jsonl").write_text(CORPUS)
    result = prepare([*words, f"data.cache_dir={tmp_path}/cache"], tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
