"""Recompute the tables and gaps of a study from its values.json, for recompute.py."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats


@dataclass
class Expected:
    """Required content of a page."""

    words: list[str] = field(default_factory=list)
    rows: list[tuple[str, list[float]]] = field(default_factory=list)
    """Verdict and numbers of each row of the table of claims."""
    sentences: list[tuple[str, list[float]]] = field(default_factory=list)
    """Sentences with {} in place of each number, and the numbers."""
    tables: list[tuple[str, list[float]]] = field(default_factory=list)
    """First cell of each table row, and the numbers of the other cells."""


def interval(values: np.ndarray, tail: float = 0.025) -> list[float]:
    """Return a mean and its interval by Student's t; the default tail gives 95% confidence."""
    half = stats.t.isf(tail, len(values) - 1) * stats.sem(values)
    return [values.mean(), values.mean() - half, values.mean() + half]


def ends(values: list[float], digits: int = 4) -> list[float]:
    """Return minimum and maximum, or one number if both print the same digits."""
    both = [min(values), max(values)]
    return both[: len({f"{value:.{digits}g}" for value in both})]


class Raw:
    """Runs of a study, from its values.json."""

    def __init__(self, path: Path, scale: str) -> None:
        self.json = json.loads(path.read_text(encoding="utf-8"))
        self.log = scale == "log"
        self.runs: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for run in self.json["runs"]:
            self.runs.setdefault(run["arm"], {}).setdefault(run["seed"], []).append(run)

    def value(self, runs: list[dict[str, Any]]) -> float | None:
        """Return the value of a seed; None if the seed diverged."""
        value = runs[0]["value"]
        if self.json["metric"] == "lr_sensitivity":
            start = math.log(runs[0]["vocab_size"])
            losses = [start if run["loss"] is None else min(run["loss"], start) for run in runs]
            ended = any(run["loss"] is not None for run in runs)
            value = sum(losses) / len(losses) - min(losses) if ended else None
        return math.log(value) if self.log and value is not None else value

    def values(self, arm: str) -> dict[int, float]:
        """Return the value of each seed that did not diverge."""
        found = {seed: self.value(runs) for seed, runs in self.runs.get(arm, {}).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def fact(self, arm: str, name: str) -> float:
        """Return a fact of the first run of an arm."""
        first = next(iter(self.runs[arm].values()))[0]
        return self.json["facts"][first["facts"]][name]

    def times(self, arm: str, level: float) -> list[list[float]]:
        """Return, for each seed, tokens until the metric reached the level, and whether it did."""
        return [runs[0]["reached"][f"{level:g}"] for runs in self.runs[arm].values()]

    def losses(self, arm: str) -> dict[int, float]:
        """Return the final held-out loss of each seed that did not diverge."""
        found = {seed: runs[0]["loss"] for seed, runs in self.runs[arm].items()}
        return {seed: loss for seed, loss in found.items() if loss is not None}

    def gap(self, arm: str, other: str, alpha: float, losses: bool = False) -> list[float]:
        """Return a mean difference and its one-sided bounds at confidence 1 - alpha.

        Args:
            losses: whether to compare held-out losses instead of the study's metric.
        """
        own, base = (self.losses(x) if losses else self.values(x) for x in (arm, other))
        seeds = sorted(own.keys() & base.keys())
        gaps = np.array([own[seed] - base[seed] for seed in seeds])
        error = stats.sem(gaps)
        if self.json["metric"] == "heldout_loss" and self.json["texts"]:
            log = self.log and not losses
            error = math.hypot(error, self.document_error(arm, other, seeds, log))
        half = stats.t.isf(alpha, len(gaps) - 1) * error
        return [gaps.mean(), gaps.mean() - half, gaps.mean() + half]

    def document_error(self, arm: str, other: str, seeds: list[int], log: bool) -> float:
        """Return the standard error of a gap in loss over documents, as a weighted residual."""
        tokens = np.array(self.json["texts"][0]["tokens"], float)
        residuals = np.zeros(len(tokens))
        for name, sign in ((arm, 1), (other, -1)):
            for seed in seeds:
                per_token = np.array(self.runs[name][seed][0]["nats"], float) / tokens
                loss = np.average(per_token, weights=tokens)
                scale = loss if log else 1.0
                residuals += sign * (per_token - loss) / scale / len(seeds)
        variance = ((tokens * residuals) ** 2).sum() / tokens.sum() ** 2
        return math.sqrt(variance * len(tokens) / (len(tokens) - 1))

    def equal_row(self, arm: str, other: str, alpha: float) -> list[float]:
        """Return the numbers of a row of the table of gaps at equal tokens and parameters."""
        gap = self.gap(arm, other, alpha, losses=True)
        share = self.fact(arm, "parameters") / self.fact(other, "parameters") - 1
        return [*gap, *(gap if abs(share) <= 0.005 else [100 * abs(share)])]

    def expected(self, page: dict[str, Any]) -> Expected:
        """Return the expected tables and gaps of the study's verdict.md.

        Args:
            page: content of the study's verdict.json.
        """
        title = f"# {page['claim']}: {page['verdict']}"
        found = Expected(words=[title, f"`{self.json['sha256']}`", f"`{page['hash']}`"])
        for name, arm in page["arms"].items():
            values = np.array([*self.values(name).values()])
            runs = [run for of_seed in self.runs.get(name, {}).values() for run in of_seed]
            diverged = sum(run["loss"] is None for run in runs)
            rates = ends([run["lr"] for run in runs])
            if len(values) > 1:
                mean, low, high = interval(values)
                if self.json["metric"].startswith("tasks/"):  # a share of right answers
                    low, high = max(low, 0.0), min(high, 1.0)
                row = [mean, low, high, len(values), diverged, len(runs), *rates]
                found.tables.append((name, row))
            stored = {
                int(seed): value for seed, value in arm["values"].items() if value is not None
            }
            if stored != self.values(name):
                found.words.append(f"values of {name} in verdict.json as in values.json")
        for rule in page["rules"]:
            own, base = (self.values(rule[side]) for side in ("arm", "against"))
            if rule["kind"] == "log_rank":
                for side in (rule["arm"], rule["against"]):
                    times = self.times(side, rule["reaches"])
                    sentence = f"{{}} of {{}} runs of {side} reach it"
                    found.sentences.append((sentence, [sum(hit for _, hit in times), len(times)]))
            elif len(own.keys() & base.keys()) > 1 and rule["gap"] is not None:
                sentence = f"{rule['arm']} minus {rule['against']} is {{}}"
                gap = self.gap(rule["arm"], rule["against"], rule["alpha"])
                found.sentences.append((sentence, gap[:1]))
        for each in page["equal"]:
            if not isinstance(each["at_tokens"], str):
                pair = each["arm"], each["against"]
                found.tables.append(
                    (" − ".join(pair), self.equal_row(*pair, page["rules"][0]["alpha"]))
                )
        return found
