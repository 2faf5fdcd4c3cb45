"""Held-out loss against what it cost: tokens, FLOPs and seconds; and gaps where that is equal."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from diffllm.compare.report.bands import Array, Band, band_of
from diffllm.compare.report.numbers import finite
from diffllm.compare.report.rows import EqualGap, Row
from diffllm.compare.report.runs import Run, Series
from diffllm.statistics.estimates import estimate

LOSS = "eval/loss"
MACHINE = ("device", "ranks", "torch", "compiled")
"""Facts of run.json that have to agree where times are compared."""


class Budget(NamedTuple):
    """Something that training uses up."""

    unit: str
    meaning: str
    spent: Callable[[Run, Array], Array | None]
    """Returns how much a run had used after so many tokens, (n,) of (n,); None where unknown."""
    facts: tuple[str, ...] = ()
    """Facts of run.json without whose agreement two runs' amounts say nothing."""


def flops_spent(run: Run, tokens: Array) -> Array | None:
    """Training FLOPs, by the model's count a token."""
    each = finite(run.facts.get("flops_per_token"))
    return None if each is None else tokens * each


def seconds_spent(run: Run, tokens: Array) -> Array | None:
    """Seconds of training steps, without evaluations and saves; between logged steps in line."""
    if "perf/step_ms" not in run.metrics.columns:
        return None
    places, step_ms = run.metrics.columns["perf/step_ms"]
    seconds = np.cumsum(np.diff(run.metrics.steps[places], prepend=0) * step_ms / 1e3)
    at = run.metrics.tokens[places]
    return np.interp(tokens, np.append(0, at), np.append(0, seconds), right=np.nan)


BUDGETS = {
    "tokens": Budget("tokens", "Tokens trained on", lambda run, tokens: tokens),
    "flops": Budget(
        "FLOPs", "Training FLOPs, forward and backward, attention counted causally", flops_spent
    ),
    "seconds": Budget(
        "seconds", "Time of training steps, without evaluations and saves", seconds_spent, MACHINE
    ),
}
"""Budgets by the name that the columns of report.csv have for each."""


def spent_curve(run: Run, budget: Budget) -> Series | None:
    """A run's held-out losses over what it had spent; None where that is unknown."""
    tokens, losses = run.series(LOSS)
    known = np.isfinite(losses)
    spent = budget.spent(run, tokens[known])
    if spent is None or not len(spent) or not np.isfinite(spent).all():
        return None
    if spent[0] <= 0 or (np.diff(spent) < 0).any():
        return None
    return Series(spent, losses[known])


def equal_gaps(row: Row) -> dict[str, EqualGap]:
    found = {name: equal_gap(row, budget) for name, budget in BUDGETS.items()}
    return {name: gap for name, gap in found.items() if gap is not None}


def equal_gap(row: Row, budget: Budget) -> EqualGap | None:
    """The gap to the row's baseline where both had spent the same.

    Curves are read in a line over the logarithm of the amount. None without a gap, where an amount
    is unknown, or where it was measured on different machines.
    """
    if row.gap is None or row.baseline is None or not same_facts(budget, [row, row.baseline]):
        return None
    bases = {run.seeds: run for run in row.baseline.runs if run.final_loss is not None}
    own = [run for run in row.runs if run.final_loss is not None and run.seeds in bases]
    pairs = [(run, bases[run.seeds]) for run in own]
    curves = [(spent_curve(a, budget), spent_curve(b, budget)) for a, b in pairs]
    known = [(a, b) for a, b in curves if a is not None and b is not None]
    if not known or len(known) < len(curves):
        return None
    at = float(min(curve.tokens[-1] for pair in known for curve in pair))
    if at < max(curve.tokens[0] for pair in known for curve in pair):
        return None  # one ends before another's first evaluation
    readings = [(read_curve(a, at), read_curve(b, at)) for a, b in known]
    gaps = [own.loss - base.loss for own, base in readings]
    errors = [float(np.hypot(own.error, base.error)) for own, base in readings]
    return EqualGap(estimate(gaps), at, float(np.mean(errors)))


def same_facts(budget: Budget, rows: list[Row]) -> bool:
    """Whether the runs of all rows agree on the facts that a budget depends on."""
    facts = {str([run.facts.get(f) for f in budget.facts]) for row in rows for run in row.runs}
    return len(facts) == 1


class Reading(NamedTuple):
    """A value of a curve, and how far it may be off."""

    loss: float
    error: float


def read_curve(curve: Series, at: float) -> Reading:
    """Read a curve between two evaluations, in a line over the logarithm of what was spent.

    The error is how far the same line is off at the evaluations on both sides, drawn without them:
    over twice the distance, so it is rather too large. Infinite where there are no others.
    """
    x, y = np.log(curve.tokens), curve.values
    place = int(np.searchsorted(x, np.log(at) * (1 - 1e-12)))
    if place < len(x) and np.isclose(x[place], np.log(at), rtol=1e-9, atol=0):
        return Reading(float(y[place]), 0.0)
    inner = [i for i in (place - 1, place) if 0 < i < len(x) - 1]
    off = [abs(y[i] - np.interp(x[i], x[[i - 1, i + 1]], y[[i - 1, i + 1]])) for i in inner]
    return Reading(float(np.interp(np.log(at), x, y)), float(max(off, default=np.inf)))


def spent_band(row: Row, budget: Budget) -> Band | None:
    """A row's held-out loss over what it had spent, the mean of its seeds; None where unknown."""
    band = band_of(row, lambda run: run.series(LOSS))
    if band is None:
        return None
    amounts = [budget.spent(run, band.x) for run in row.runs]
    known = [amount for amount in amounts if amount is not None and np.isfinite(amount).any()]
    if not known:
        return None
    counted = np.ma.masked_invalid(known)
    x = counted.mean(axis=0).filled(np.nan)
    spent = dict(zip(band.x.tolist(), x.tolist(), strict=True))
    stops = [(spent[tokens], loss) for tokens, loss in band.stops]
    return replace(band, x=x, stops=stops).at(np.isfinite(x))
