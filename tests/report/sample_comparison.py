"""Comparisons of runs that never happened, with metrics that look as if they had."""

import copy
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

import diffllm
from diffllm.config import TrainConfig
from diffllm.report.comparison import Comparison, Difference, Estimate, Row
from diffllm.report.runs import Run
from diffllm.spikes import SpikeMonitor

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
def config(variant: str) -> TrainConfig:
    return diffllm.load_config(["model=tiny", "seq_len=2048", f"attention={variant}"])


def run(
    variant: str,
    seed: int = 0,
    n: int = 200,
    every: int = 10,
    probes: bool = False,
    label: str | None = None,
    finished: bool = True,
) -> Run:
    """A run with a line every `every` steps, n lines."""
    cfg = copy.deepcopy(config(variant))
    cfg.seed, cfg.steps = seed, n * every
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
        if step % (len(steps) // 10 or 1) == 0:
            window = loss[max(0, step - 50) : step]
            line["eval/loss"] = float(np.median(window) + 0.04 + rng.normal(0, 0.004))
        lines.append(line)
    parameters = 1_100_000 + 60_000 * NINE.index(variant) if variant in NINE else 1_000_000
    facts = {
        "parameters": parameters, "active_parameters": parameters,
        "flops_per_token": 6.4 * parameters, "corpus": "stdlib", "device": "CPU", "ranks": 1,
    }  # fmt: skip
    path = Path("outputs/compare") / f"{label or variant}-{seed}"
    return Run(path, cfg, facts, {"steps": n * every} if finished else None, lines)


def in_block(variant: str, t: float, rng: np.random.Generator, probes: bool) -> dict[str, float]:
    """What diagnostics of a step at the share `t` of the run look like."""
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


def estimate(values: list[float]) -> Estimate | None:
    if not values:
        return None
    mean, n = float(np.mean(values)), len(values)
    if n == 1:
        return Estimate(mean)
    half = float(stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n))
    return Estimate(mean, mean - half, mean + half, n)


def final(runs: list[Run]) -> dict[int, float]:
    """The last held-out loss of each seed."""
    losses = {r.cfg.seed: r.series("eval/loss").values for r in runs}
    return {seed: float(v[-1]) for seed, v in losses.items() if len(v)}


def row(runs: list[Run], baseline: list[Run] | None = None, label: str | None = None, **keys: Any):
    """A row; `baseline` None for the baseline itself."""
    first, losses = runs[0], final(runs)
    others = final(baseline or [])
    gap = estimate([losses[s] - others[s] for s in losses if s in others])
    last = first.lines[-1] if first.lines else {}
    norms = [
        float(np.nanmax(s)) for s in (r.series("train/grad_norm").values for r in runs) if s.size
    ]

    def at_end(quantity: str, pick: Any) -> float | None:
        values = first.by_layer(quantity).values
        return float(pick(values[-1])) if values.size else None

    values = {
        "variant": first.variant,
        **keys,
        **{k: first.facts.get(k) for k in ("parameters", "active_parameters", "flops_per_token")},
        "tokens": last.get("tokens"),
        "seeds": len(runs),
        "baseline": baseline[0].variant if baseline else None,
        **{
            f"{p}/{s}_{w}": last.get(f"{p}/{s}_{w}")
            for p in ("spikes", "spikes_olmo2")
            for s in ("loss", "grad")
            for w in ("score", "total")
        },
        "spikes/skipped_total": last.get("spikes/skipped_total"),
        "train/grad_norm": max(norms, default=None),
        "hidden_top1": at_end("hidden_top1", np.max),
        "hidden_kurtosis": at_end("hidden_kurtosis", np.max),
        "context_rms_min": at_end("context_rms_min", np.min),
        "context_rms_max": at_end("context_rms_max", np.max),
        "perf/tokens_per_s": last.get("perf/tokens_per_s"),
        "perf/mfu": None,
    }
    keys = {"attention": first.variant, **keys}
    return Row(label or first.variant, keys, runs, estimate([*losses.values()]), gap, values)


def compared(variants: tuple[str, ...], seeds: int, n: int = 200, probes: bool = False):
    """A row a variant, gaps to the first."""
    runs = {v: [run(v, seed, n, probes=probes) for seed in range(seeds)] for v in variants}
    base = runs[variants[0]]
    rows = [row(runs[v], None if v == variants[0] else base) for v in variants]
    title = (
        " against ".join((", ".join(variants[1:]), variants[0])) if variants[1:] else variants[0]
    )
    return Comparison(title, rows, variants[0] if variants[1:] else None)


def incomparable() -> Comparison:
    """Rows of different length, one of them unfinished."""
    long, short = [run("standard", s, 80) for s in (0, 1)], [run("diff_v2", 0, 40, finished=False)]
    rows = [row(long), row(short)]
    difference = Difference("steps", {"800": ["standard"], "400": ["diff_v2"]})
    notes = ["diff_v2, seed 0, has not finished: 400 of 800 steps."]
    return Comparison("diff_v2 against standard", rows, "standard", [difference], notes)


def barely_started() -> Comparison:
    """One run with one line, and one with none."""
    one, none = run("diff_v2", n=1, finished=False), run("standard", n=1, finished=False)
    one.lines, none.lines = one.lines[:1], []
    notes = ["standard, seed 0, has logged nothing yet."]
    return Comparison("Two young runs", [row([one]), row([none])], "standard", notes=notes)


def not_finite() -> Comparison:
    """A run that diverged, with null where its numbers were NaN."""
    runs = [run("standard", s, 60) for s in (0, 1)]
    for at, line in enumerate(runs[1].lines):
        if at > 30:
            for name in line:
                if name.startswith(("train/", "eval/", "hidden", "context")):
                    line[name] = None
    made = row(runs)
    made.values |= {"train/grad_norm": math.nan, "hidden_top1": math.inf, "tokens": None}
    made.loss = Estimate(math.nan, math.nan, math.nan, 2)
    return Comparison("A divergence", [made], None)


HOSTILE = '<script>alert("x")</script>&\'"{{ 7 * 7 }}#fe0000'


def hostile() -> Comparison:
    """Names that would be markup."""
    runs = {v: [run(v, 0, 30, label=HOSTILE)] for v in ("standard", "gated")}
    rows = [row(runs["standard"], label=HOSTILE), row(runs["gated"], runs["standard"])]
    rows[1].label = "</title></svg><img src=x onerror=alert(1)>"
    difference = Difference(HOSTILE, {HOSTILE: [HOSTILE]})
    return Comparison(HOSTILE, rows, "standard", [difference], [HOSTILE])


def sweep_of_rates() -> Comparison:
    """Two variants at three learning rates."""
    rows = []
    for rate in (3e-4, 1e-3, 3e-3):
        runs = {v: [run(v, s, 60) for s in (0, 1)] for v in ("standard", "diff_v2")}
        base = runs["standard"]
        rows.append(row(base, label=f"standard lr={rate:g}", **{"optim.lr": rate}))
        rows.append(row(runs["diff_v2"], base, f"diff_v2 lr={rate:g}", **{"optim.lr": rate}))
    return Comparison("diff_v2 against standard at three learning rates", rows, "standard")
