"""The columns of report.csv: what each means, a row's values of them, and the file's text."""

import csv
import io
import json
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np

from diffllm.report.comparison import Comparison, Estimate, Row
from diffllm.report.numbers import number
from diffllm.report.runs import Run, Series

SPIKES = tuple(
    f"{definition}/{series}_{what}"
    for what in ("score", "total")
    for definition in ("spikes", "spikes_olmo2")
    for series in ("loss", "grad")
)
SKIPPED = "spikes/skipped_total"

COLUMNS = {
    "variant": "choice of attention=; a column for every other swept key comes after it",
    "parameters": "of the whole decoder",
    "active_parameters": "that one token passes through",
    "flops_per_token": "training FLOPs a token, forward and backward, attention counted causally",
    "tokens": "that a whole run trains on: steps x global_batch_size x seq_len",
    "seeds": "finished runs that the loss is the mean of",
    "seeds_diverged": "finished runs with a held-out loss that is not finite: in no loss or gap",
    "loss": "held-out loss after the last step, nats a token, mean over seeds",
    "loss_low": "lower end of its 95% interval, Student's t over seeds",
    "loss_high": "upper end of its 95% interval",
    "gap": "loss minus the baseline's, mean over the seeds that both have",
    "gap_low": "lower end of its 95% interval, paired Student's t over these seeds",
    "gap_high": "upper end of its 95% interval",
    "gap_seeds": "how many seeds these are",
    "baseline": "label of the row that the gap is measured from; empty where there is no gap",
    "incomparable": "keys that differ between rows and that no loss can be compared across, as "
    "JSON; empty where all rows are comparable",
    "spikes/loss_score": "share of steps with a loss over mean + 6 sigma of the 128 before; mean "
    "over seeds",
    "spikes/grad_score": "the same of the gradient norm",
    "spikes_olmo2/loss_score": "share of steps with a loss 7 sigma or more from the mean of the "
    "1,000 before; mean over seeds",
    "spikes_olmo2/grad_score": "the same of the gradient norm",
    "spikes/loss_total": "number of such steps in a run, mean over seeds",
    "spikes/grad_total": "the same of the gradient norm",
    "spikes_olmo2/loss_total": "number of such steps in a run, mean over seeds",
    "spikes_olmo2/grad_total": "the same of the gradient norm",
    SKIPPED: "updates that were skipped in a run, mean over seeds",
    "train/grad_norm": "largest before clipping, over logged steps, warm-up included, and seeds; "
    "often that of the first steps, and the larger the more seeds there are",
    "hidden_top1": "largest magnitude in a block's output, over layers, diagnosed steps, warm-up "
    "included, and seeds; the larger the more seeds there are",
    "hidden_kurtosis": "of a block's output over channels at the last diagnosed step, the largest "
    "of the layers, mean over seeds; 3 for a normal law",
    "context_rms_min": "smallest context RMS of a token and head at the last diagnosed step, over "
    "layers and seeds; the smaller the more seeds there are",
    "context_rms_max": "largest context RMS of a token and head at the last diagnosed step, over "
    "layers and seeds; the larger the more seeds there are",
    "perf/tokens_per_s": "median over logged intervals, mean over seeds",
    "perf/mfu": "model FLOPs utilisation, median over logged intervals, mean over seeds",
}
"""Column to what it means. All but the swept keys and the sizes are of finished runs; what is
unknown is None, an empty cell."""


def row_values(row: Row, incomparable: list[str], skips: bool) -> dict[str, Any]:
    """The columns of a row, in order.

    Args:
        incomparable: keys that no loss of the report can be compared across.
        skips: whether some run of the report counts skipped updates.
    """
    finished = [run for run in row.runs if run.summary is not None]
    swept = {key: value for key, value in row.keys.items() if key != "attention"}
    cfg = row.runs[0].cfg
    values = {
        "variant": row.keys["attention"],
        **swept,
        **{
            name: first(run.facts.get(name) for run in row.runs)
            for name in ("parameters", "active_parameters", "flops_per_token")
        },
        "tokens": cfg.steps * cfg.global_batch_size * cfg.seq_len,
        "seeds": row.loss.seeds if row.loss else 0,
        "seeds_diverged": row.diverged,
        **estimate_columns("loss", row.loss),
        **estimate_columns("gap", row.gap),
        "gap_seeds": row.gap.seeds if row.gap else None,
        "baseline": row.baseline.label if row.baseline else None,
        "incomparable": incomparable or None,
        **{name: mean(final(run, name) for run in finished) for name in SPIKES},
    }
    if skips:
        values[SKIPPED] = mean(final(run, SKIPPED) for run in finished)
    return values | {
        "train/grad_norm": most(max, (run.series("train/grad_norm") for run in finished)),
        "hidden_top1": most(max, (run.by_layer("hidden_top1") for run in finished)),
        "hidden_kurtosis": mean(most(max, [end(run, "hidden_kurtosis")]) for run in finished),
        "context_rms_min": most(min, (end(run, "context_rms_min") for run in finished)),
        "context_rms_max": most(max, (end(run, "context_rms_max") for run in finished)),
        "perf/tokens_per_s": mean(median(run.series("perf/tokens_per_s")) for run in finished),
        "perf/mfu": mean(median(run.series("perf/mfu")) for run in finished),
    }


def csv_text(comparison: Comparison) -> str:
    """A header and a line a row; numbers in full precision."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(comparison.rows[0].values)
    for row in comparison.rows:
        writer.writerow(map(cell, row.values.values()))
    return file.getvalue()


def cell(value: Any) -> str:
    """Empty for None, JSON for lists and truth values."""
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, (bool, list, dict)) else str(value)


def estimate_columns(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """The three columns of an estimate."""
    mean, low, high = (
        (estimate.mean, estimate.low, estimate.high) if estimate else (None, None, None)
    )
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def final(run: Run, name: str) -> float | None:
    """What the summary says, else the last finite value that was logged."""
    value = number((run.summary or {}).get(name))
    if value is not None:
        return value
    values = finite_values(run.series(name))
    return float(values[-1]) if len(values) else None


def end(run: Run, quantity: str) -> Series:
    """A per-layer quantity at the last step that has it."""
    series = run.by_layer(quantity)
    return Series(series.tokens[-1:], series.values[-1:])


def finite_values(series: Series) -> np.ndarray:
    """Its numbers, (n,): NaN and infinity left out."""
    return series.values[np.isfinite(series.values)]


def most(extreme: Any, parts: Iterable[Series]) -> float | None:
    """The largest (`max`) or smallest (`min`) number of several series."""
    ends = [float(extreme(values)) for values in map(finite_values, parts) if len(values)]
    return extreme(ends) if ends else None


def median(series: Series) -> float | None:
    values = finite_values(series)
    return float(np.median(values)) if len(values) else None


def mean(values: Iterable[float | None]) -> float | None:
    """Of the known ones."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def first(values: Iterable[Any]) -> Any:
    """The first known one."""
    return next((value for value in values if value is not None), None)
