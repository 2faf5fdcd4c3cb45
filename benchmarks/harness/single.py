"""Measurements that take one call of a worker."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import diagnostics_cost
import memory as peak
import torch
from decoding import measured as measured_decoding
from decoding import random_model
from measuring import alone
from steps import DOCUMENT_END, with_documents

from diffllm.config import load_config
from diffllm.model.documents import Documents
from diffllm.training.build import build
from diffllm.training.choices import for_json
from harness.breakdown import kernel_times, part_of
from harness.records import ROOT, read
from harness.worker import State

FAILURES = 20
"""Failed tests that a result names."""


def kernels(
    state: State, words: list[str], widths: list[int], backends: list[str], tokens: int
) -> dict[str, Any]:
    """The attention kernels that one layer runs in a forward pass, a backward pass and a decoding
    step, by width of heads, backend and mask; the error of a case that cannot run in its place.

    Args:
        tokens: of the sequence; two of them are a batch.
    """
    found: dict[str, Any] = {}
    for width in widths:
        for backend in backends:
            for masked in (False, True):
                name = f"d={width} {backend}{' documents' if masked else ''}"
                more = [f"model.head_dim={width}", f"model.attention.backend={backend}"]
                try:
                    found[name] = kernels_of([*words, *more], tokens, masked, state["device"])
                except Exception as error:
                    reason = (str(error).strip().splitlines() or [""])[0][:200]
                    found[name] = {"error": f"{type(error).__name__}: {reason}"}
    return found


def kernels_of(words: list[str], tokens: int, masked: bool, name: str) -> dict[str, Any]:
    """Choices that the config leaves to the device, and milliseconds by attention kernel of a
    forward pass, a backward pass and a decoding step.

    Args:
        masked: whether documents are masked.
        name: of the device.
    """
    device = torch.device(name)
    cfg = load_config([*words, "model.n_layers=1", f"seq_len={tokens}"])
    dtype = torch.bfloat16
    cfg.model.attention.prepare(cfg.model, device, dtype, masked)
    chosen = cfg.model.attention.choices(cfg.model, device, dtype, masked)
    model = random_model(cfg.model, device, dtype)
    attention = model.layers[0].attention
    inputs = torch.randint(1, cfg.model.vocab_size, (2, tokens))
    documents = None
    if masked:
        documents = Documents.of(with_documents(inputs, tokens // 8), DOCUMENT_END).to(device)
    rope, mask = model.whole_sequences(inputs.to(device), documents, dtype)
    x = torch.randn(2, tokens, cfg.model.dim, device=device, dtype=dtype, requires_grad=True)
    attention(x, rope, mask).sum().backward()  # compiles, and tries kernels out
    out: list[torch.Tensor] = []
    passes = {
        "forward": kernel_times(lambda: out.append(attention(x, rope, mask)), device),
        "backward": kernel_times(lambda: out[0].backward(torch.ones_like(out[0])), device),
    }
    if not masked:
        passes["decoding"] = decoding_kernels(attention, model, tokens, device)
    named = {
        key: {n: ms for n, ms in times.items() if part_of(n).startswith("attention")}
        or dict(list(times.items())[:3])
        for key, times in passes.items()
    }
    return {"chosen": for_json(chosen), **named}


@torch.no_grad()
def decoding_kernels(
    attention: Any, model: Any, tokens: int, device: torch.device
) -> dict[str, float]:
    """Milliseconds by kernel of a decoding step with `tokens` - 1 keys before it."""
    cache = attention.new_cache(1, tokens, torch.bfloat16, device)
    cache.k.normal_()
    cache.v.normal_()
    cache.length = tokens - 2
    x = torch.randn(1, 1, model.cfg.dim, device=device, dtype=torch.bfloat16)
    attention(x, model.rope(tokens - 2, 1), None, cache)
    return kernel_times(lambda: attention(x, model.rope(tokens - 1, 1), None, cache), device)


def tests(state: State, file: str, limit: float, at_once: int) -> dict[str, Any]:
    """Run the gpu-marked tests of a file: how many ended how, and which failed and why.

    Args:
        limit: seconds after which they are killed; tests that have ended by then count.
        at_once: tests at the same time on a GPU.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-o", "addopts=", "-m", "gpu", file]
    command += ["-p", "no:cacheprovider", "--tb=line"]
    if state["device"] == "cuda" and has_xdist():
        command += ["-n", str(at_once)]
    ended = "in time"
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=with_path(), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ended = f"killed after {limit:.0f} s"
        output.seek(0)
        text = output.read()
    print(text, flush=True)  # into the worker's log
    outcomes = test_outcomes(text)
    failed = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    lines = re.findall(r"^(?:FAILED|ERROR) (\S+) - (.*)$", text, re.MULTILINE)
    return {
        "counts": dict(Counter(outcomes.values())),
        "ended": ended,
        "failed": failed[:FAILURES],
        "reasons": {name: reason[:200] for name, reason in lines[:FAILURES]},
        "exit_code": process.returncode,
    }


def test_outcomes(text: str) -> dict[str, str]:
    """Outcome by test, read from the output of `pytest -v`, with workers of xdist or without."""
    outcomes = {}
    for line in text.splitlines():
        alone = re.match(r"(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", line)
        shared = re.match(r"\[gw\d+\].*? (PASSED|FAILED|ERROR|SKIPPED|XFAIL) (\S+::.+?)\s*$", line)
        if alone:
            outcomes[alone[1]] = alone[2]
        elif shared:
            outcomes[shared[2]] = shared[1]
    return outcomes


def has_xdist() -> bool:
    """Whether pytest can run several tests at once."""
    try:
        import xdist  # noqa: F401
    except ImportError:
        return False
    return True


def with_path() -> dict[str, str]:
    """This process's environment, with the package on PYTHONPATH, as it may not be installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def diagnostics(state: State, words: list[str], rounds: int) -> dict[str, Any]:
    """The cost of diagnostics at their default intervals."""
    with alone(state["device"]) as device:
        return diagnostics_cost.measured(build(load_config(words), device), rounds)


def decoding(
    state: State, words: list[str], lengths: list[int], tokens: int, batch: int
) -> list[dict[str, Any]]:
    """Every main variant over a growing context."""
    return measured_decoding(words, lengths, tokens, batch, torch.device(state["device"]))


def memory(state: State, attention: str, checkpointing: bool, words: list[str]) -> dict[str, Any]:
    """Peak bytes of a step, as planned and, on a GPU, as measured."""
    cfg = peak.config(attention, checkpointing, words)
    plan = peak.planned(cfg)
    with alone(state["device"]) as device:
        return {"plan": plan, "measured": peak.measured(cfg, device)}


def training_run(state: State, words: list[str], folder: str, limit: float) -> dict[str, Any]:
    """A run of train.py that is stopped after its first save, and then continued to its end."""
    run = Path(folder).absolute()
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, str(ROOT / "train.py"), *words, f"run.dir={run}"]
    if state["device"] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    end = time.monotonic() + limit

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=ROOT, env=with_path())

    first = start()
    while first.poll() is None and time.monotonic() < end:
        if list(run.glob("checkpoints/step-*")):
            first.send_signal(signal.SIGTERM)
            break
        time.sleep(0.05)
    first.wait(max(1, end - time.monotonic()))
    steps = [int(path.name.partition("-")[2]) for path in run.glob("checkpoints/step-*")]
    stopped_at = max(steps, default=0)
    begun = time.monotonic()
    second = start()
    second.wait(max(1, end - time.monotonic()))
    if first.returncode or second.returncode:
        raise RuntimeError(f"exit codes {first.returncode}, {second.returncode}; see the log")
    lines = read(run / "metrics.jsonl")
    return {
        "stopped_at": stopped_at,
        "steps": lines[-1]["step"],
        "loss": [lines[0]["train/loss"], lines[-1]["train/loss"]],
        "speed": {key: lines[-1].get(f"perf/{key}") for key in ("tokens_per_s", "mfu")},
        "second_run_s": time.monotonic() - begun,
        "summary": run.joinpath("summary.json").read_text()[:2000],
    }
