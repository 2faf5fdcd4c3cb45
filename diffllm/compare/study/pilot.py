"""The seeds, tokens and hours that a gap takes, according to finished runs: a pilot."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from diffllm.compare.report.comparison import read
from diffllm.compare.report.notes import thin_note
from diffllm.compare.report.numbers import finite
from diffllm.compare.report.rows import Row
from diffllm.compare.study.design import exact_note
from diffllm.core.errors import ConfigError
from diffllm.statistics.power_analysis import (
    chance_of_less,
    least_seeds,
    paired_power,
    welch_power,
)
from diffllm.statistics.seed_variance import Pairs, SeedSpread, pairs, pooled
from diffllm.statistics.smallest_p import smallest_p

SHOWN = (3, 5, 8, 12)
ARMS = 2
HALF = 0.5
"""A power below which a study more likely misses the gap than finds it."""
TESTS = {"unpaired": "welch", "paired": "paired"}


def power_numbers(
    paths: list[Path], gap: float, alpha: float, power: float, sides: int, comparisons: int
) -> tuple[dict[str, Any], Pairs | None]:
    """Return the content of `diffllm power --json`, and the pairs of two arms with common seeds.

    Reads the comparable runs of which most is known; raises ConfigError without two seeds.
    """
    comparison, _ = read(paths)
    first, *others = sorted(
        comparison.groups,
        key=lambda group: sum(max(0, len(finite_losses(row)) - 1) for row in group.rows),
        reverse=True,
    )
    rows = [row for row in first.rows if row.ended]
    losses = [finite_losses(row) for row in rows]
    several = [each for each in losses if len(each) > 1]
    spread, diverged = pooled(several), sum(row.diverged for row in rows)
    finished = [run.summary or {} for row in rows for run in row.finished]
    if spread is None:
        runs = f"{len(finished)} finished, {diverged} diverged"
        raise ConfigError(f"pilot: {comparison.title} needs at least 2 seeds of an arm: {runs}")
    if not spread.sd:
        raise ConfigError(f"pilot: the seeds of {comparison.title} do not vary: no power follows")
    times = [x for summary in finished if (x := finite(summary.get("seconds")))]
    seconds = float(np.mean(times)) if times else None
    tokens, paired = first.rows[0].runs[0].planned_tokens, pairs(several)

    def need(design: str, spread: SeedSpread, test: Callable[..., float]) -> dict[str, Any]:
        def chance(sd: float, seeds: int) -> float:
            return test(gap, sd, seeds, alpha / comparisons, sides)

        sds = {"": spread.upper, "_by_sd": spread.sd}
        sds |= zip(("_low", "_high"), spread.interval, strict=True)
        seeds = {f"seeds{end}": least_seeds(partial(chance, sd), power) for end, sd in sds.items()}
        asked = seeds["seeds"]
        risks = {
            f"{name}{end}": chance_of_less(chance, spread, sds[end] / spread.sd, power, less)
            for end in ("", "_by_sd")
            for name, less in (("too_few", power), ("far_too_few", HALF))
        }
        return {
            "design": design,
            **{"sd": spread.sd, "sd_low": sds["_low"], "sd_high": sds["_high"]},
            "sd_upper": spread.upper,
            **seeds,
            "power": chance(spread.upper, asked) if asked else None,
            "power_by_seeds": {n: chance(spread.upper, n) for n in SHOWN},
            **risks,
            "df": spread.df,
            "smallest_p": smallest_p(TESTS[design], asked, asked, sides) if asked else None,
            "total_tokens": ARMS * asked * tokens if asked else None,
            "hours": ARMS * asked * seconds / 3600 if asked and seconds else None,
        }

    needs = [need("unpaired", spread, welch_power)]
    if paired and paired.differences.sd:
        needs.append(need("paired", paired.differences, paired_power))
    exact = [
        exact_note(TESTS[each["design"]], each["seeds"], comparisons, alpha, sides)
        for each in needs
        if each["seeds"]
    ]
    left_out = ", ".join(row.label for group in others for row in group.rows)
    note = f"left out, since they cannot be compared with the others: {left_out}"
    thin = thin_note(run for row in rows for run in row.finished)
    arms = [
        {"arm": row.label, "seeds": len(own), "diverged": row.diverged,
         "sd": (found := pooled([own])) and found.sd}
        for row, own in zip(rows, losses, strict=True)
    ]  # fmt: skip
    low, high = spread.interval
    return {
        **{"gap": gap, "alpha": alpha, "power": power, "sides": sides, "comparisons": comparisons},
        "pilot": comparison.title,
        "arms": arms,
        "runs": sum(map(len, losses)) + diverged,
        "diverged": diverged,
        "tokens": tokens,
        "seconds": seconds,
        **{"sd": spread.sd, "sd_low": low, "sd_high": high, "df": spread.df},
        "correlation": paired and paired.correlation,
        "sd_of_differences": paired and paired.differences.sd,
        "needs": needs,
        "notes": [*filter(None, (note * bool(left_out), thin, *exact))],
    }, paired


def finite_losses(row: Row) -> dict[tuple[int, int], float]:
    return {seed: loss for seed, loss in row.losses.items() if loss is not None}
