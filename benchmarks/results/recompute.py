"""Recompute the numbers of the verdict pages from the committed values of each seed.

    python benchmarks/results/recompute.py [RESULTS]

The script uses numpy and scipy, but not diffllm. It recomputes each number of every verdict.md and
each number of the claims in README.md, and compares the printed digits. It prints one line per page
and exits with status 1 if a number differs. If the values per seed are lost, a number is compared
with the JSON or CSV file that contains it. The tables, the gaps and bounds of rules and the counts
of log-rank rules on a page are recomputed from values.json. p of the rules is recomputed only where
README.md repeats it.
"""

import csv
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from recompute_values import Expected, Raw, ends, interval
from scipy import stats

NUMBER = r"(?<![\w.+\-−])[+\-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?[kMBTPE%]?(?!\.?\w)"
ROWS = (
    *(("retrieval_mqar", rule) for rule in range(5)),
    *(("large_lr", rule) for rule in range(5)),
    *(("damping_2", rule) for rule in range(4)),
)  # fmt: skip
"""Study and rule of each row of the README's table."""


def parsed(text: str) -> tuple[float, float]:
    """Return a printed number and half a unit of its last digit."""
    sign, digits, exponent, unit = re.fullmatch(
        r"([+\-−]?)([\d.]+)(e.*?)?([kMBTPE%]?)", text
    ).groups()  # type: ignore[union-attr]
    scale = float(f"1{exponent or ''}") * 1e3 ** max(0, " kMBTPE".find(unit or " "))
    half = 0.5 * 10 ** -len(digits.partition(".")[2])
    return (-1 if sign in ("-", "−") else 1) * float(digits) * scale, half * scale


def holm(ps: list[float]) -> list[float]:
    """Return p values after Holm's correction."""
    order = np.argsort(ps, kind="stable")
    steps = [min(1.0, ps[i] * (len(ps) - rank)) for rank, i in enumerate(order)]
    adjusted = dict(zip(order, np.maximum.accumulate(steps), strict=True))
    return [float(adjusted[i]) for i in range(len(ps))]


def verdict_of(p: float, opposite: float, alpha: float) -> str:
    """Return the verdict from the adjusted p of a claim and of the opposite claim."""
    return "shown" if p < alpha else "refuted" if opposite < alpha else "underpowered"


Times = list[list[float]]
"""For each seed: tokens until the level, and 1, or all tokens of the run, and 0."""


def log_rank(own: Times, base: Times) -> float:
    """Return the exact one-sided permutation p of the log-rank test that `own` is faster."""
    tokens, hit = np.array([*own, *base]).T
    scores = hit.copy()  # events minus the expected number of events
    for time in np.unique(tokens[hit > 0]):
        at_risk = tokens >= time
        scores -= at_risk * (hit[tokens == time].sum() / at_risk.sum())
    places = itertools.combinations(range(len(tokens)), len(own))
    sums = np.array([scores[[*each]].sum() for each in places])
    return float((sums >= sums[0] - 1e-9).mean())


class Rule:
    """Rule of a study with recomputed numbers."""

    def __init__(
        self, given: dict[str, Any], values: dict[str, np.ndarray], log: bool, raw: Raw
    ) -> None:
        self.given, self.log, self.alpha = given, log, given["alpha"]
        self.own, self.base = values[given["arm"]], values[given["against"]]
        self.level, self.size = given.get("reaches"), len(self.own)
        self.sign = -1 if given["above"] is None else 1
        self.bound = given["below"] if self.sign < 0 else given["above"]
        self.error = stats.sem(self.own - self.base)
        if raw.json["metric"] == "heldout_loss":
            arms = given["arm"], given["against"]
            seeds = sorted(raw.values(arms[0]))
            self.error = math.hypot(self.error, raw.document_error(*arms, seeds, log))
        half = stats.t.isf(0.025, self.size - 1) * self.error
        mean = (self.own - self.base).mean()
        self.gap = [mean, mean - half, mean + half]
        if self.level:
            self.times = [raw.times(given[side], self.level) for side in ("arm", "against")]

    @cached_property
    def p(self) -> float:
        """One-sided p of the t test or the log-rank test."""
        if self.level:
            return log_rank(*self.times)
        t = (self.gap[0] - self.bound) / self.error
        return float(stats.t.sf(self.sign * t, self.size - 1))

    @cached_property
    def opposite(self) -> float:
        """One-sided p of the opposite claim."""
        return log_rank(*reversed(self.times)) if self.level else 1 - self.p


class Page:
    """Recomputed numbers of a study's verdict.md."""

    def __init__(self, path: Path) -> None:
        self.json = json.loads(path.read_text(encoding="utf-8"))
        self.arms = self.json["arms"]
        self.values = {name: np.array([*arm["values"].values()]) for name, arm in self.arms.items()}
        self.raw = Raw(path.with_name("values.json"), self.json["scale"])

    @cached_property
    def rules(self) -> list[Rule]:
        """Rules whose numbers can be recomputed."""
        known = [rule for rule in self.json["rules"] if rule["kind"] in ("difference", "log_rank")]
        return [Rule(rule, self.values, self.json["scale"] == "log", self.raw) for rule in known]

    def holm(self, ps: list[float]) -> list[float]:
        """Return p values after Holm's correction for all rules; removed rules have p = 1."""
        removed = len(self.json["rules"]) - len(ps)
        return holm([*ps, *[1.0] * removed])[: len(ps)]

    @cached_property
    def adjusted(self) -> list[float]:
        """One-sided p after Holm's correction."""
        return self.holm([rule.p for rule in self.rules])

    @cached_property
    def opposite(self) -> list[float]:
        """One-sided p of the opposite claims after Holm's correction."""
        return self.holm([rule.opposite for rule in self.rules])

    @cached_property
    def verdicts(self) -> list[str]:
        """Verdict of each rule."""
        alphas = [rule.alpha for rule in self.rules]
        return [*map(verdict_of, self.adjusted, self.opposite, alphas)]

    def facts(self, names: list[str]) -> tuple[float, list[float], list[float], list[float]]:
        """Return tokens, parameters, tokens per parameter, and two spreads.

        The spreads are the percentages by which the largest value exceeds the smallest value, of
        parameters and of FLOPs.
        """
        arms = [self.arms[name] for name in names]
        sizes, flops = ([arm[key] for arm in arms] for key in ("parameters", "flops_per_token"))
        ratios = [arm["tokens"] / arm["parameters"] for arm in arms]
        apart = [100 * (max(x) / min(x) - 1) for x in (sizes, flops)]
        return arms[0]["tokens"], ends(sizes), ends(ratios, 2), apart

    def row(self, i: int) -> list[float]:
        """Return the numbers of rule i's row in the README."""
        rule, adjusted = self.rules[i], self.adjusted[i]
        found = [math.exp(x) for x in rule.gap] if rule.log else rule.gap
        if rule.level:
            found = [x for of in rule.times for x in (sum(hit for _, hit in of), len(of))]
            found.insert(0, rule.level)
        if self.verdicts[i] == "refuted" and rule.level:
            found = [*found, self.opposite[i]]
        elif rule.level or adjusted < rule.alpha:
            found = [*found, adjusted]
        tokens, sizes, ratios, apart = self.facts([rule.given["arm"], rule.given["against"]])
        return [*found, *sizes, tokens, *ratios, rule.size, *(x for x in apart if x > 0.5)]


def head_norm(path: Path) -> Iterator[tuple[str, list[float]]]:
    """Yield the verdict on the head norm of V1 and V2 after each number of steps, and its row."""
    found = json.loads(path.read_text(encoding="utf-8"))
    own = found["matrices"].index("wo")
    logs = {variant: np.log(norms)[..., own] for variant, norms in found["norms"].items()}
    pairs = ("diff_v1", "diff_v1_no_head_norm"), ("diff_v2_head_norm", "diff_v2")
    cases = [case for a, b in pairs for case in zip(found["steps"], logs[a] - logs[b], strict=True)]
    slopes = [np.polyfit(np.log(found["lengths"]), of.T, 1)[0] for _, of in cases]
    ps = [float(stats.ttest_1samp(each, 0, alternative="greater").pvalue) for each in slopes]
    judged = zip(cases, slopes, holm(ps), holm([1 - p for p in ps]), strict=True)
    for (step, of), slope, above, below in judged:
        numbers = [step, *np.exp(of.mean(0))[[0, -1]], *interval(slope), above]
        yield verdict_of(above, below, found["alpha"]), numbers


def learning_rates(page: Page, report: Path) -> Iterator[tuple[str, list[float]]]:
    """Yield each arm of a study of learning rates, and the numbers of its row in the README."""
    table = [*csv.DictReader(report.read_text(encoding="utf-8").splitlines())]
    for name, arm in page.arms.items():
        runs = [run for seed in page.raw.runs[name].values() for run in seed]
        losses: dict[float, list[float]] = {}
        for run in runs:
            loss = math.inf if run["loss"] is None else run["loss"]
            losses.setdefault(run["lr"], []).append(loss)
        mean, rate = min((sum(each) / len(each), lr) for lr, each in losses.items())
        own = [row for row in table if row["variant"] == arm["variant"]]
        events = [sum(float(row[f"{kind}_events"]) for row in own) for kind in ("loss", "grad")]
        diverged = sum(run["loss"] is None for run in runs)
        yield name, [page.values[name].mean(), diverged, len(runs), rate, mean, *events]


def sentences(pages: dict[str, Page]) -> Iterator[tuple[str, str, list[float]]]:
    """Yield page, sentence and numbers of handwritten text; each number is replaced by {}."""
    recall = pages["retrieval_mqar"].raw
    times = [recall.times(arm, 0.9) for arm in ("v2", "half", "standard")]
    medians = [sorted(tokens for tokens, _ in arm)[(len(arm) - 1) // 2] for arm in times]
    yield "README.md", "medians are {} and {} tokens, against {} of standard", medians


def expectations(root: Path) -> dict[str, Expected]:
    """Recompute the required content of every page below `root`, by the path of the page."""
    pages = {path.parent.name: Page(path) for path in sorted(root.glob("*/verdict.json"))}
    found = {f"{name}/verdict.md": page.raw.expected(page.json) for name, page in pages.items()}
    found["README.md"] = Expected()
    for name, i in ROWS:
        found["README.md"].rows.append((pages[name].verdicts[i], pages[name].row(i)))
    found["README.md"].rows += head_norm(root / "gradients.json")
    found["README.md"].tables += learning_rates(pages["large_lr"], root / "large_lr" / "report.csv")
    for name, sentence, numbers in sentences(pages):
        found[name].sentences.append((sentence, numbers))
    return found


def differences(text: str, expected: Expected) -> Iterator[str]:
    """Yield the differences between the text of a page and the recomputed numbers."""
    yield from (f"not on the page: {words}" for words in expected.words if words not in text)
    plain = re.sub(r"`[^`]*`", "", text)
    rows = re.findall(r"^\| [A-Z].*\*\*.*$", plain, re.M)
    if len(rows) != len(expected.rows):
        yield f"{len(rows)} rows, expected {len(expected.rows)}"
    pairs = []
    for row, (verdict, numbers) in zip(rows, expected.rows, strict=False):
        claim = row.split("|")[1].strip()
        pairs.append((claim, re.findall(NUMBER, row), numbers))
        if f"**{verdict}**" not in row and f"(rule: {verdict})" not in row:
            yield f"{claim}: its rule gives {verdict}"
    for name, numbers in expected.tables:
        row = re.search(rf"^\| {re.escape(name)} \|(.*)$", plain, re.M)
        pairs.append((name, re.findall(NUMBER, row[1]) if row else [], numbers))
    said = re.sub(r"\s+", " ", re.sub(r"^> ?", "", plain, flags=re.M))
    for sentence, numbers in expected.sentences:
        found = re.search(f"({NUMBER})".join(map(re.escape, sentence.split("{}"))), said)
        pairs.append((sentence, list(found.groups()) if found else [], numbers))
    for where, tokens, numbers in pairs:
        if len(tokens) != len(numbers):
            yield f"{where}: {len(tokens)} numbers, expected {len(numbers)}"
        for token, number in zip(tokens, numbers, strict=False):
            value, half = parsed(token.replace(",", ""))
            if not abs(value - number) <= half * (1 + 1e-9):
                yield f"{where}: {token} on the page, {number:.6g} recomputed"


def main(root: Path) -> int:
    """Check all pages; return the exit status."""
    status = 0
    for page, expected in expectations(root).items():
        named = expected.rows + expected.sentences + expected.tables
        count = sum(len(numbers) for _, numbers in named)
        problems = [*differences((root / page).read_text(encoding="utf-8"), expected)]
        print(f"{page}: {count} numbers recomputed, {len(problems)} differ")
        print("".join(f"  {problem}\n" for problem in problems), end="")
        status = status or int(bool(problems))
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent))
