"""vLLM serves exports with the log-probabilities of the run's model, under continuous batching,
chunked prefill and prefix caching. `make test-vllm` creates the environment."""

import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
from exported_runs import CASES
from runs.json_files import read_json, write_json

import diffllm
from diffllm.cli import main
from diffllm.model import Transformer

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON is not set: run make test-vllm"),
]
UNSERVED = ("diff_v1_clamped",)
"""Variants with maps that kernels of softmax attention cannot compute."""
SERVED = [name for name in CASES if name not in UNSERVED]
COMPILED = ("standard", "diff_v2")
CLOSE = 3e-5


@pytest.fixture
def exported(make_run, tmp_path):
    """Return a function that exports the run of a case."""

    def make(name: str) -> Path:
        architecture, words = CASES[name]
        run, out = make_run(name, *words), tmp_path / "hf" / name
        own = ["own=true"] if architecture == "DiffLlamaForCausalLM" else []
        assert main(["export", f"run={run}", f"out={out}", *own]) == 0
        return out

    return make


def prompts(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, 400) for _ in range(length)] for length in lengths]


@torch.no_grad()
def logprobs(model: Transformer, tokens: list[int]) -> torch.Tensor:
    """Return the log-probability of each token except the first."""
    found = model(torch.tensor([tokens]))[0, :-1].log_softmax(-1)
    return found.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_log_probabilities_from_vllm_match_original_run(exported, tmp_path):
    asked = prompts([200, 7, 100, 33, 150, 64])  # the first prompt fills blocks of the cache
    requests = [
        {"directory": str(exported(name)), "prompts": asked, "compiled": name in COMPILED}
        for name in SERVED
    ]
    write_json(tmp_path / "requests.json", requests)
    script = str(Path(__file__).with_name("serving.py"))
    command = [PYTHON, script, str(tmp_path / "requests.json"), str(tmp_path / "out.json")]
    with open(tmp_path / "said", "w", encoding="utf-8") as said:
        ended = subprocess.run(command, cwd=tmp_path, stdout=said, stderr=said)
    assert ended.returncode == 0, (tmp_path / "said").read_text(encoding="utf-8")[-3000:]
    results = read_json(tmp_path / "out.json")
    room = {}
    for name, result in zip(SERVED, results, strict=True):
        model, _ = diffllm.load_model(tmp_path / name)
        for one in result["found"]:
            mine = logprobs(model, one["tokens"])
            assert (mine - torch.tensor(one["logprobs"])).abs().max() < CLOSE, name
        assert result["cached"] > 0, name
        again, first = result["again"], result["found"][0]
        assert again["tokens"] == first["tokens"][len(asked[0]) :], name
        difference = torch.tensor(again["logprobs"]) - torch.tensor(first["logprobs"][-16:])
        assert difference.abs().max() < CLOSE, name
        room[name] = result["cache_tokens"]
    assert set(room.values()) == {room["standard"]}  # same bytes per token as standard attention
