"""Recompute the tables and gaps of a study from its values.json, for recompute.py."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

IN_NATS = ("heldout_loss", "train_loss", "lr_sensitivity")
"""Metrics in nats per token."""


@dataclass
class Expected:
    """Required content of a page."""

    words: list[str] = field(default_factory=list)
    rows: list[tuple[str, list[float]]] = field(default_factory=list)
    """Verdict and numbers of each row of the table of claims."""
    sentences: list[tuple[str, list[float]]] = field(default_factory=list)
    """Sentences with {} in place of each number, and the numbers."""
    tables: list[tuple[str, list[float]]] = field(default_factory=list)
    """First cell of each table row, and the numbers of the other cells.

    Rows with the same first cell have the order of the page.
    """


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

    def sizes(self, arm: str) -> list[float]:
        """Return parameters, FLOPs per token, tokens per run, and tokens per parameter of an arm.

        Facts that the run did not record are omitted.
        """
        parameters, flops = (self.fact(arm, name) for name in ("parameters", "flops_per_token"))
        tokens = next(iter(self.runs[arm].values()))[0]["planned_tokens"]
        ratio = tokens / parameters if parameters else None
        numbers = (parameters, flops, tokens, ratio)
        return [number for number in numbers if number is not None]

    def times(self, arm: str, level: float) -> list[list[float]]:
        """Return, for each seed, tokens until the metric reached the level, and whether it did."""
        return [runs[0]["reached"][f"{level:g}"] for runs in self.runs[arm].values()]

    def gap(self, arm: str, other: str, alpha: float) -> list[float]:
        """Return a mean difference and its one-sided bounds at confidence 1 - alpha."""
        own, base = self.values(arm), self.values(other)
        seeds = sorted(own.keys() & base.keys())
        gaps = np.array([own[seed] - base[seed] for seed in seeds])
        error = stats.sem(gaps)
        if self.json["metric"] == "heldout_loss" and self.json["texts"]:
            error = math.hypot(error, self.document_error(arm, other, seeds, self.log))
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

    def rule_sentence(self, rule: dict[str, Any]) -> tuple[str, list[float]]:
        """Return the sentence with a rule's gap and bounds, {} for each number, and the numbers."""
        mean, low, high = self.gap(rule["arm"], rule["against"], rule["alpha"])
        unit = "" if self.log or self.json["metric"] not in IN_NATS else " nats per token"
        start = f"{rule['arm']} minus {rule['against']} is {{}}{unit} ("
        confidence = f"{100 * (1 - rule['alpha']):g}%"
        if rule["kind"] == "equivalence":
            return f"{start}{100 * (1 - 2 * rule['alpha']):g}% interval {{}} to {{}}", [
                mean,
                low,
                high,
            ]
        if rule["verdict"] not in ("shown", "refuted"):
            return f"{start}{confidence} bounds {{}} and {{}}", [mean, low, high]
        if (rule["below"] is not None) == (rule["verdict"] == "shown"):
            return f"{start}{confidence} upper bound {{}}", [mean, high]
        return f"{start}{confidence} lower bound {{}}", [mean, low]

    def size_words(self, arm: str, other: str) -> str:
        """Return the text about the numbers of parameters of two arms."""
        share = self.fact(arm, "parameters") / self.fact(other, "parameters") - 1
        if abs(share) <= 0.005:
            return "at equal parameters (within 0.5%)"
        percent = float(f"{100 * abs(share):.2g}")
        return f"{arm} has {percent:g}% {'more' if share > 0 else 'fewer'} parameters"

    def cost_row(self, budget: dict[str, Any]) -> list[float]:
        """Return steps, tokens per run, planned seconds, and mean measured seconds of an arm."""
        runs = [run for of_seed in self.runs[budget["arm"]].values() for run in of_seed]
        measured = sum(run["train_seconds"] for run in runs) / len(runs)
        return [budget["steps"], runs[0]["planned_tokens"], budget["planned"], measured]

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
                row += self.sizes(name)
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
                found.sentences.append(self.rule_sentence(rule))
                if self.json["metric"] == "heldout_loss":
                    found.words.append(self.size_words(rule["arm"], rule["against"]))
        for budget in page.get("budget", {}).get("arms", []):
            found.tables.append((budget["arm"], self.cost_row(budget)))
        return found
