"""Recompute the numbers of the verdict pages from the committed values of each seed.

    python benchmarks/results/recompute.py [RESULTS]

The script uses numpy and scipy, but not diffllm. It recomputes each number of every verdict.md and
each number of the claims in README.md, and compares the printed digits. It prints one line per page
and exits with status 1 if a number differs. If the values per seed are lost, a number is compared
with the JSON or CSV file that contains it. The tables, the gaps and bounds of rules and the counts
of log-rank rules on a page are recomputed from values.json. p of the rules is recomputed only where
README.md repeats it. benchmarks/results_tables.py writes the tables of README.md.
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
    *(("equal_time", rule) for rule in range(2)),
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
        self.margin = given["margin"] if given["kind"] == "equivalence" else None
        self.sign = -1 if given["above"] is None else 1
        self.bound = given["below"] if self.sign < 0 else given["above"]
        self.error = stats.sem(self.own - self.base)
        if raw.json["metric"] == "heldout_loss":
            arms = given["arm"], given["against"]
            seeds = sorted(raw.values(arms[0]))
            self.error = math.hypot(self.error, raw.document_error(*arms, seeds, log))
        half = stats.t.isf(self.alpha, self.size - 1) * self.error
        mean = (self.own - self.base).mean()
        self.gap = [mean, mean - half, mean + half]
        if self.level:
            self.times = [raw.times(given[side], self.level) for side in ("arm", "against")]

    def tail(self, bound: float, sign: int) -> float:
        """Return the one-sided p that the gap is above (sign 1) or below (sign -1) a bound."""
        t = (self.gap[0] - bound) / self.error
        return float(stats.t.sf(sign * t, self.size - 1))

    @cached_property
    def p(self) -> float:
        """P of the claim: one-sided t test, two one-sided t tests, or log-rank test."""
        if self.level:
            return log_rank(*self.times)
        if self.margin:
            return max(self.tail(self.margin, -1), self.tail(-self.margin, 1))
        return self.tail(self.bound, self.sign)

    @cached_property
    def opposite(self) -> float:
        """P of the opposite claim."""
        if self.level:
            return log_rank(*reversed(self.times))
        if self.margin:
            return min(1.0, 2 * min(self.tail(self.margin, 1), self.tail(-self.margin, -1)))
        return 1 - self.p


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
        kinds = ("difference", "equivalence", "log_rank")
        known = [rule for rule in self.json["rules"] if rule["kind"] in kinds]
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

    def facts(self, names: list[str]) -> tuple[list[float], list[float]]:
        """Return sizes and tokens of arms, and three spreads.

        The first list has parameters, tokens, and tokens per parameter. The spreads are the
        percentages by which the largest value exceeds the smallest value, of parameters, FLOPs per
        token and tokens.
        """
        arms = [self.arms[name] for name in names]
        keys = ("parameters", "flops_per_token", "tokens")
        sizes, flops, tokens = ([arm[key] for arm in arms] for key in keys)
        ratios = [arm["tokens"] / arm["parameters"] for arm in arms]
        apart = [100 * (max(x) / min(x) - 1) for x in (sizes, flops, tokens)]
        return [*ends(sizes), *ends(tokens), *ends(ratios, 2)], apart

    def row(self, i: int) -> list[float]:
        """Return the numbers of rule i's row in the README."""
        rule = self.rules[i]
        numbers = [rule.margin] if rule.margin else []
        if rule.level:
            numbers = [rule.level]
            for arm in rule.times:
                numbers += [sum(hit for _, hit in arm), len(arm)]
        else:
            numbers += rule.gap
        refuted = self.verdicts[i] == "refuted"
        numbers.append((self.opposite if refuted else self.adjusted)[i])
        sizes, apart = self.facts([rule.given["arm"], rule.given["against"]])
        return [*numbers, *sizes, rule.size, *(x for x in apart if x > 0.5)]


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
        title = name.upper() if name in ("v1", "v2") else name
        yield title, [page.values[name].mean(), diverged, len(runs), rate, mean, *events]


def sentences(pages: dict[str, Page], root: Path) -> Iterator[tuple[str, list[float]]]:
    """Yield sentences of README.md, with {} in place of each number, and the numbers."""
    recall = pages["retrieval_mqar"]
    times = [recall.raw.times(arm, 0.9) for arm in ("v2", "half", "standard")]
    medians = [sorted(tokens for tokens, _ in arm)[(len(arm) - 1) // 2] for arm in times]
    yield "medians are {} and {} tokens, against {} of standard", medians
    yield "(p {} of the opposite claim)", [recall.opposite[3]]

    report = root / "compare_small" / "report_diff_v2.csv"
    rows = csv.DictReader(report.read_text(encoding="utf-8").splitlines())
    gated = next(row for row in rows if row["variant"] == "gated")
    gap = [-float(gated[key]) for key in ("gap", "gap_high", "gap_low")]
    yield "V2 minus gated is {} ({} to {}; three seeds", gap
    yield "so the gap of {} says", [-pages["damping_2"].rules[1].gap[0]]

    sweep = pages["large_lr"]
    arms = learning_rates(sweep, root / "large_lr" / "report.csv")
    best_rates = {numbers[3] for _, numbers in arms}
    largest = max(run["lr"] for run in sweep.raw.json["runs"])
    yield "at its floor of {}", [0.5 ** sweep.rules[2].size]
    yield "rates up to {} times the best", [largest / min(best_rates)]

    content = json.loads((root / "gradients.json").read_text(encoding="utf-8"))
    yield "no exact p can be below {}", [0.5 ** len(content["seeds"])]
    with_norm, without = (np.array(content["norms"][f"diff_v2{x}"]) for x in ("_head_norm", ""))
    place = content["steps"].index(100), ..., content["matrices"].index("wo")
    ratios = np.exp(np.log(with_norm[place] / without[place]).mean(0))
    lowered = [n for n, ratio in zip(content["lengths"], ratios, strict=True) if ratio < 1]
    yield "on up to {} tokens. With four", [max(lowered)]

    timed = pages["equal_time"]
    yield "V2's loss is {} nats above that of gated", [timed.rules[0].gap[0]]
    budgets = {arm["arm"]: arm for arm in timed.json["budget"]["arms"]}
    gated_budget, v2_budget = budgets["gated"], budgets["v2"]
    steps = gated_budget["planned"] / gated_budget["steps"]
    yield "takes {} times as long", [v2_budget["planned"] / v2_budget["steps"] / steps]
    fewer = 100 * (1 - v2_budget["tokens"] / gated_budget["tokens"])
    yield "trained on {} fewer tokens", [fewer]
    apart = 100 * (v2_budget["measured"] / gated_budget["measured"] - 1)
    yield "The measured seconds differ by {}", [apart]


def expectations(root: Path) -> dict[str, Expected]:
    """Recompute the required content of every page below `root`, by the path of the page."""
    pages = {path.parent.name: Page(path) for path in sorted(root.glob("*/verdict.json"))}
    found = {f"{name}/verdict.md": page.raw.expected(page.json) for name, page in pages.items()}
    found["README.md"] = Expected()
    for name, i in ROWS:
        found["README.md"].rows.append((pages[name].verdicts[i], pages[name].row(i)))
    found["README.md"].rows += head_norm(root / "gradients.json")
    found["README.md"].tables += learning_rates(pages["large_lr"], root / "large_lr" / "report.csv")
    found["README.md"].sentences += sentences(pages, root)
    return found


def occurrences(sentence: str, text: str) -> list[list[str]]:
    """Return the numbers at each {} of a sentence, for each occurrence of the sentence."""
    pattern = f"({NUMBER})".join(map(re.escape, sentence.split("{}")))
    return [[*match.groups()] for match in re.finditer(pattern, text)]


def differences(text: str, expected: Expected) -> Iterator[str]:
    """Yield the differences between the text of a page and the recomputed numbers."""
    yield from (f"not on the page: {words}" for words in expected.words if words not in text)
    plain = re.sub(r"`[^`]*`", "", text)
    rows = re.findall(r"^\| .*\*\*.*$", plain, re.M)
    if len(rows) != len(expected.rows):
        yield f"{len(rows)} rows, expected {len(expected.rows)}"
    pairs = []
    for row, (verdict, numbers) in zip(rows, expected.rows, strict=False):
        claim = row.split("**")[0].strip("| ")
        pairs.append((claim, re.findall(NUMBER, row), numbers))
        if f"**{verdict}**" not in row and f"(rule: {verdict})" not in row:
            yield f"{claim}: its rule gives {verdict}"
    rows_by_name: dict[str, list[str]] = {}
    for name, cells in re.findall(r"^\| ([^|]*) \|(.*)$", plain, re.M):
        rows_by_name.setdefault(name, []).append(cells)
    for name, numbers in expected.tables:
        remaining = rows_by_name.get(name, [])
        cells = remaining.pop(0) if remaining else ""
        pairs.append((name, re.findall(NUMBER, cells), numbers))
    said = re.sub(r"\s+", " ", re.sub(r"^> ?", "", plain, flags=re.M))
    for sentence, numbers in expected.sentences:
        for found in occurrences(sentence, said) or [[]]:
            pairs.append((sentence, found, numbers))
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
