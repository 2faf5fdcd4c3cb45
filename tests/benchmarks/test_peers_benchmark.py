"""benchmarks/peers.py: summary of rounds, missing frameworks, and diffllm as a contestant."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest
from tiers import slow_but

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import peers

from diffllm.distributed.launcher import strict_mode

TINY = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 8, "ffn": 32, "vocab": 640,
        "batch": 2, "seq": 16}  # fmt: skip


def row(number, contestant, speed):
    found = {"round": number, "segment": "A:bf16:eager", "contestant": contestant}
    return {**found, "error": "died"} if speed is None else {
        **found, "tokens_per_s": speed, "parameters": 2_500_000,
    }  # fmt: skip


def test_benchmark_summary_computes_speed_ratios_within_each_round():
    speeds = {
        "LitGPT": [50, 100, None],
        "diffllm": [100, 150, 300],
        "diffllm trainer": [80, 150, 240],
    }
    rows = [row(i, name, speed) for name, of in speeds.items() for i, speed in enumerate(of)]
    results = peers.summary(rows)
    found = results["A:bf16:eager"]
    assert found["LitGPT"] == {"median": 75, "min": 50, "max": 100}
    assert found["diffllm / LitGPT"] == {"median": 1.75, "min": 1.5, "max": 2.0}
    assert found["diffllm trainer / diffllm"] == {"median": 0.8, "min": 0.8, "max": 1.0}
    lines = peers.table(results).lines()
    assert ["LitGPT", "75 (50 to 100)"] in lines
    assert ["diffllm / LitGPT", "1.75 (1.50 to 2.00)"] in lines


def test_benchmark_skips_framework_that_is_not_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "PEERS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["peers.py", "--contestants", "diffllm", "LitGPT"])
    monkeypatch.setattr(peers, "measure", lambda name, *_: row(0, name, 100))
    with pytest.raises(SystemExit, match="False"):
        peers.main()
    skipped = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    assert skipped == ["LitGPT: skipped, not installed (see docs/speed.md)"]


@pytest.mark.slow
@pytest.mark.parametrize("contestant", slow_but(["diffllm"], ["diffllm", "diffllm trainer"]))
def test_benchmark_measures_speed_of_diffllm_on_tiny_model(contestant, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "SHAPES", {"A": TINY})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    args = Namespace(seconds=0.1, attention="gated")
    found = peers.measure(contestant, tmp_path, "A:fp32:eager", args)
    assert "error" not in found, found["error"]
    assert found["tokens_per_s"] == pytest.approx(32 * found["steps"] / found["seconds"])
    assert found["parameters"] > 2 * 16 * 400
    assert len(found["losses"]) == 2
    assert found["mkl_cbwr"] == strict_mode()
