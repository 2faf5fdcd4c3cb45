"""Comparisons of synthetic runs with plausible metrics."""

import copy
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import diffllm
from diffllm.compare.arms.run import Metrics, Run
from diffllm.compare.report.comparison import Comparison, compare
from diffllm.compare.report.rows import Group
from diffllm.config import TrainConfig
from diffllm.metrics.spikes import SpikeMonitor

FOUR = ("standard", "gated", "diff_v1", "diff_v2")
NINE = (
    *FOUR, "diff_v2_unshared_kv", "diff_v2_no_lambda", "diff_v2_no_sigmoid", "diff_v2_head_norm",
    "standard_1p5x_heads",
)  # fmt: skip
GAIN = {"gated": -0.012, "diff_v1": -0.004, "diff_v2": -0.025, "diff_v2_no_sigmoid": 0.011,
        "diff_v2_unshared_kv": 0.03, "diff_v2_no_lambda": 0.006}  # fmt: skip
STABILITY = {"diff_v2_unshared_kv": 0.012, "diff_v2_no_sigmoid": 0.006, "standard": 0.003}
LAYERS = 8
TOKENS_A_STEP = 8 * 2048


@cache
def config_of_sample(variant: str) -> TrainConfig:
    return diffllm.load_config(["model=tiny", "seq_len=2048", f"attention={variant}"])


def run_of(
    variant: str,
    seed: int = 0,
    n: int = 200,
    every: int = 10,
    probes: bool = False,
    label: str | None = None,
    finished: bool = True,
) -> Run:
    """Return a run with n metrics lines, one every `every` steps."""
    cfg = copy.deepcopy(config_of_sample(variant))
    cfg.seed, cfg.steps = seed, n * every
    lines = [dict(line) for line in made_lines(variant, seed, n, every, probes)]
    parameters = 1_100_000 + 60_000 * NINE.index(variant) if variant in NINE else 1_000_000
    facts = {
        "parameters": parameters, "active_parameters": parameters,
        "flops_per_token": 6.4 * parameters, "corpus": "stdlib", "tokenizer": "own",
        "compute_dtype": "float32", "device": "CPU", "ranks": 1,
    }  # fmt: skip
    path = Path("outputs/compare") / f"{label or variant}-{seed}"
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    summary = {"steps": n * every, "heldout_loss": losses[-1], "seconds": 61.0 + seed}
    return Run(path, cfg, facts, summary if finished else None, Metrics(lines))


@cache
def made_lines(
    variant: str, seed: int, n: int, every: int, probes: bool
) -> tuple[dict[str, Any], ...]:
    """Return the lines of a run's metrics.jsonl."""
    rng = np.random.default_rng([seed, sum(map(ord, variant))])
    steps = np.arange(1, n * every + 1)
    data = np.random.default_rng(seed).normal(0, 0.06, len(steps))
    loss = (
        3.1 + 6 * (1 + steps / (0.02 * len(steps) + 5)) ** -0.55 + GAIN.get(variant, 0)
        + data + rng.normal(0, 0.01, len(steps)) + rng.normal(0, 0.004)
    )  # fmt: skip
    late = steps / steps[-1]
    drift = 1 + (2 * late**4 if variant.startswith("diff_v1") else 0)
    norm = (0.35 + 5 * np.exp(-steps / (0.05 * len(steps) + 3))) * drift
    norm = norm * rng.lognormal(0, 0.12, len(steps))
    jumps = rng.random(len(steps)) < STABILITY.get(variant, 0.0005)
    loss = loss + jumps * rng.exponential(0.8, len(steps))
    norm = norm * (1 + jumps * rng.exponential(12, len(steps)))
    monitor, lines = SpikeMonitor(), []
    for step in steps:
        monitor.update(loss[step - 1], norm[step - 1])
        if step % every and step != 1:
            continue
        t = step / steps[-1]
        line: dict[str, Any] = {
            "step": int(step),
            "tokens": int(step) * TOKENS_A_STEP,
            **in_block(variant, t, rng, probes),
            "train/loss": float(loss[step - 1]),
            "train/grad_norm": float(norm[step - 1]),
            "train/lr": 1e-3 * min(1, 20 * t) * (1 - 0.9 * t),
            "train/param_norm": 60 + 25 * math.sqrt(t),
            "perf/tokens_per_s": 2400 + 50 * float(rng.normal()),
            **monitor.metrics(),
        }
        if probes:
            line |= {
                "train/update_norm": 0.3 * (1 - 0.9 * t) * float(rng.lognormal(0, 0.05)),
                "spikes/skipped_total": float(monitor.counters["spikes/grad"].total),
                **{
                    f"grad_norm/{group}": float(norm[step - 1] * share)
                    for group, share in (("attention", 0.5), ("ffn", 0.7), ("embedding", 0.2))
                },
            }
        else:
            del line["spikes/skipped_total"]
        if step % (len(steps) // 10 or 1) == 0:
            window = loss[max(0, step - 50) : step]
            line["eval/loss"] = float(np.median(window) + 0.04 + rng.normal(0, 0.004))
        lines.append(line)
    return tuple(lines)


def in_block(variant: str, t: float, rng: np.random.Generator, probes: bool) -> dict[str, float]:
    """Return plausible diagnostics of the step at share `t` of a run."""
    depth = np.arange(LAYERS) / LAYERS
    scale = {"diff_v2_no_lambda": 0.12, "diff_v2_no_sigmoid": 0.5 + 3 * t}.get(variant, 0.35)
    mean = scale * (0.3 + 0.7 * t) * (0.5 + depth) * rng.lognormal(0, 0.03, LAYERS)
    growth = 1 + 40 * t * (depth > 0.5) * (0.25 if "diff" in variant or variant == "gated" else 1)
    values = {
        "context_rms": mean,
        "context_rms_min": 0.1 * mean,
        "context_rms_max": 3 * mean,
        "hidden_top1": 4 * growth * rng.lognormal(0, 0.1, LAYERS),
        "hidden_kurtosis": 3 + 2 * growth * rng.lognormal(0, 0.1, LAYERS),
    }
    if variant.startswith("diff_v1"):
        values["lambda_mean"] = 0.8 - 0.6 * np.exp(-2.4 * depth) - 0.15 * t * depth
    elif variant.startswith("diff_v2") and variant != "diff_v2_no_lambda":
        raw = 1.7 if variant == "diff_v2_no_sigmoid" else 1
        values["lambda_mean"] = raw * (0.5 - 0.3 * t * np.sin(3 * depth)) + rng.normal(0, 0.01)
    if "lambda_mean" in values:
        values["lambda_min"] = values["lambda_mean"] - 0.2 * t
        values["lambda_max"] = values["lambda_mean"] + 0.4 * t
    if variant.startswith("gated"):
        values["gate_mean"] = 0.5 - 0.3 * t * depth
    if probes:
        values["attn_entropy"] = 6 - 3 * t * (0.4 + depth)
        values["attn_logit_top1"] = 2 + 30 * t * depth
        values["sink_mass"] = 0.6 * t * depth * (0.1 if "diff" in variant else 1)
        values["attn_negative_share"] = 0.4 * t * (1 - depth) * ("diff" in variant)
    return {
        f"{name}/layer_{layer:02d}": float(value)
        for name, by_layer in values.items()
        for layer, value in enumerate(by_layer)
    }


def comparison_of(variants: tuple[str, ...], seeds: int, n: int = 200, probes: bool = False):
    """Return a comparison with a row per variant, and gaps to the first row."""
    runs = [run_of(v, seed, n, probes=probes) for v in variants for seed in range(seeds)]
    base, *others = variants
    title = f"{', '.join(others)} against {base}" if others else base
    return compare(runs, base if others else None, title)


def incomparable() -> Comparison:
    """Return rows of different numbers of steps, one row with an unfinished run."""
    long = [run_of("standard", seed, 80) for seed in (0, 1)]
    short = run_of("diff_v2", 0, 40, finished=False)
    return compare([*long, short], title="diff_v2 against standard")


def lines_of(run: Run) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl as dicts, with NaN for null."""
    both = zip(run.metrics.steps.tolist(), run.metrics.tokens.tolist(), strict=True)
    lines: list[dict[str, Any]] = [{"step": step, "tokens": tokens} for step, tokens in both]
    for name, (places, values) in run.metrics.columns.items():
        for at, value in zip(places.tolist(), values.tolist(), strict=True):
            lines[at][name] = value
    return lines


def barely_started() -> Comparison:
    """Return a run with a single metrics line, and a run without lines."""
    one, none = run_of("diff_v2", n=1, finished=False), run_of("standard", n=1, finished=False)
    one.metrics, none.metrics = Metrics(lines_of(one)[:1]), Metrics([])
    return compare([one, none], title="Two young runs")


def not_finite() -> Comparison:
    """Return a diverged run with null for NaN in its metrics, and a row of only such numbers."""
    runs = [run_of("standard", s, 60) for s in (0, 1)]
    lines = lines_of(runs[1])
    for line in lines[31:]:
        for name in line:
            if name.startswith(("train/", "eval/", "hidden", "context")):
                line[name] = None
    runs[1].metrics, runs[1].summary = Metrics(lines), {"heldout_loss": None}
    made = compare(runs, title="A divergence")
    (row,) = made.rows
    row.values.update({"train/grad_norm": math.nan, "hidden_top1": math.inf, "tokens": None})
    return made


HOSTILE = '<script>alert("x")</script>&\'"{{ 7 * 7 }}#fe0000'


def hostile() -> Comparison:
    """Return a comparison whose names contain HTML markup."""
    made = compare(
        [run_of(v, 0, 30, label=HOSTILE + v) for v in ("standard", "gated")], title=HOSTILE
    )
    for row in made.rows:
        row.runs[0].facts |= {"command": HOSTILE, "variant_line": HOSTILE}
        row.runs[0].summary = {**(row.runs[0].summary or {}), "sample": f"\x07{HOSTILE}"}
    base = replace(made.rows[0], label=HOSTILE)
    row = replace(made.rows[1], label="</title></svg><img src=x onerror=alert(1)>", against=base)
    apart = {HOSTILE: HOSTILE}
    groups = [Group("A", [base], apart), Group("B", [row], apart)]
    return replace(made, rows=[base, row], groups=groups, differences=[HOSTILE], notes=[HOSTILE])


def sweep_of_rates() -> Comparison:
    """Return two variants at three learning rates."""
    runs = []
    for rate in (3e-4, 1e-3, 3e-3):
        for variant in ("standard", "diff_v2"):
            for seed in (0, 1):
                made = run_of(variant, seed, 60, label=f"{variant}-lr{rate:g}")
                made.cfg.optim.lr = rate
                runs.append(made)
    return compare(runs, title="diff_v2 against standard at three learning rates")
