"""benchmarks/peers.py: the summary of rounds, missing frameworks, and our own contestants."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest
from tiers import slow_but

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import peers

TINY = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 64, "batch": 2,
        "seq": 16}  # fmt: skip


def row(number, contestant, speed):
    found = {"round": number, "segment": "A:bf16:eager", "contestant": contestant}
    return {**found, "error": "died"} if speed is None else {
        **found, "tokens_per_s": speed, "parameters": 2_500_000,
    }  # fmt: skip


def test_summary_pairs_speeds_of_the_same_round():
    speeds = {
        "LitGPT": [50, 100, None],
        "diffllm": [100, 150, 300],
        "diffllm trainer": [80, 150, 240],
    }
    rows = [row(i, name, speed) for name, of in speeds.items() for i, speed in enumerate(of)]
    results = peers.summary(rows)
    found = results["A:bf16:eager"]
    assert list(found) == ["diffllm", "diffllm trainer", "LitGPT"]
    assert found["LitGPT"]["tokens_per_s"] == {"median": 75, "min": 50, "max": 100}
    assert found["LitGPT"]["rounds"] == 2
    ratio, of_trainer = found["LitGPT"]["ratio"], found["diffllm trainer"]["trainer_over_step"]
    assert (ratio["median"], ratio["min"], ratio["max"]) == (1.75, 1.5, 2.0)
    assert (of_trainer["median"], of_trainer["min"], of_trainer["max"]) == (0.8, 0.8, 1.0)
    segment, ratios, trainer = peers.tables(results)
    assert "| LitGPT | 2.50M | 75 (50 to 100) | 1.75 (1.50 to 2.00) |" in segment
    assert "| LitGPT | 1.75 (1.50 to 2.00) |" in ratios
    assert "| diffllm trainer | 0.80 (0.80 to 1.00) |" in trainer


def test_contestant_that_is_not_installed_is_skipped_with_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "PEERS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["peers.py", "--contestants", "diffllm", "LitGPT"])
    monkeypatch.setattr(peers, "measure", lambda name, where, args: row(0, name, 100))
    peers.main()
    skipped = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    command = "python benchmarks/peers.py --install LitGPT"
    assert skipped == [f"LitGPT: skipped, not installed; run: {command}"]


@pytest.mark.parametrize("contestant", slow_but(["diffllm"], ["diffllm", "diffllm trainer"]))
def test_own_contestant_trains_a_tiny_model(contestant, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "SHAPES", {"A": TINY})
    monkeypatch.setattr(peers, "PEERS", tmp_path)
    args = Namespace(seconds=0.1, threads=1, attention="gated", nanochat=None)
    found = peers.measure(contestant, "A:fp32:eager", args)
    assert "error" not in found, found["error"]
    assert found["tokens_per_s"] == pytest.approx(32 * found["steps"] / found["seconds"])
    assert found["parameters"] > 2 * 16 * 64
    assert len(found["losses"]) == 2
    assert found["mkl_cbwr"] == "AVX2,STRICT"
