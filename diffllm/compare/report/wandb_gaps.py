"""Gaps to the baseline over tokens as a wandb run of their own, beside the runs compared."""

from pathlib import Path

import numpy as np

from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.curves import gap_band, rows_of_gaps, seed_noise
from diffllm.metrics.wandb_run import WandbRun, resolve_mode

KIND = "comparison"


def record_gaps(comparison: Comparison, directory: Path) -> bool:
    """Record `gap/<row>`, its `low` and `high`, and `gap/noise_floor` over `tokens`; return whether
    anything was recorded. Mode and project are those of the first row's runs."""
    rows = [row for row in comparison.rows if row.gap]
    bands = {row.label: band for row in rows if (band := gap_band(row)) is not None}
    cfg = comparison.rows[0].runs[0].cfg.wandb
    if not bands or resolve_mode(cfg) == "disabled":
        return False
    lines: dict[int, dict[str, float]] = {}

    def note(name: str, tokens: np.ndarray, values: np.ndarray) -> None:
        for x, value in zip(tokens.tolist(), values.tolist(), strict=True):
            lines.setdefault(int(x), {})[name] = value

    for label, band in bands.items():
        for end, values in (("", band.mean), ("/low", band.low), ("/high", band.high)):
            note(f"gap/{label}{end}", band.x, values)
    if floor := seed_noise(rows_of_gaps(comparison.rows)):
        note("gap/noise_floor", floor.tokens, floor.values)
    facts = {"baseline": comparison.baseline, "rows": [row.label for row in comparison.rows]}
    choices = {"attention": KIND, "model": KIND}
    run = WandbRun(cfg, directory, choices, directory.name, facts, None, over_tokens=("gap/*",))
    for step, (tokens, line) in enumerate(sorted(lines.items())):
        run.log({"step": step, "tokens": tokens, **line})
    run.finish({f"gap/{row.label}": row.gap.mean for row in rows if row.gap})
    return True
