"""Recompute the numbers of the verdict pages from the committed values of each seed.

    python benchmarks/results/recompute.py [RESULTS]

The script uses numpy and scipy, and nothing of diffllm. It compares each number of every verdict.md
and each number of the claims in README.md with its own result, to the printed digits. It prints one
line per page and exits with status 1 if a number differs. Numbers whose values per seed are lost
are compared with the JSON or CSV file that holds them, and counted as copied.
"""

import csv
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

STUDIES = Path(__file__).resolve().parents[2] / "conf" / "study"
NUMBER = r"(?<![\w.+\-−])[+\-−±]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?[kM%]?(?!\.?\w)"
SCALE = {"k": 1e3, "M": 1e6}
ROWS = (
    ("damping_short", 0), ("context_rms_start", 0), ("context_rms_start", 2),
    ("context_rms_end", 0), ("context_rms_end", 1), ("context_rms_end", 2), ("head_norm", 0),
    ("retrieval_needle_short", 0), ("retrieval_mqar_short", 0), ("retrieval_mqar_short", 2),
    ("retrieval_mqar_short", 1),
)  # fmt: skip
"""Study and rule of each row of the README's table."""


class Copied(float):
    """A number that cannot be recomputed because its values per seed are lost."""


def parsed(text: str) -> tuple[float, float]:
    """Return a printed number and half a unit of its last digit."""
    found = re.fullmatch(r"([\d.]+)(e[+-]?\d+)?([kM%]?)", text.replace(",", "").lstrip("+-−±"))
    assert found, text
    scale = float(f"1{found[2] or ''}") * SCALE.get(found[3], 1)
    digits = len(found[1].partition(".")[2])
    sign = -1 if text[0] in "-−" else 1
    return sign * float(found[1]) * scale, 0.5 * 10**-digits * scale


def interval(values: np.ndarray) -> list[float]:
    """Return a mean and its 95% interval by Student's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return [values.mean(), values.mean() - half, values.mean() + half]


def holm(ps: list[float]) -> list[float]:
    """Return p values after Holm's correction."""
    order, adjusted, largest = np.argsort(ps, kind="stable"), [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, ps[i] * (len(ps) - rank)))
        adjusted[i] = largest
    return adjusted


def ends(values: list[float], digits: int = 4) -> list[float]:
    """Return the extremes, or one number if both print the same digits."""
    both = sorted(values)[:: max(len(values) - 1, 1)]
    return both[: len({f"{value:.{digits}g}" for value in both})]


@dataclass
class Rule:
    """A rule of a study with its recomputed numbers."""

    given: dict[str, Any]
    own: np.ndarray
    base: np.ndarray
    log: bool

    @property
    def log_rank(self) -> bool:
        return self.given["kind"] == "log_rank"

    @property
    def sign(self) -> int:
        """-1 for a rule that claims a gap below its bound, 1 for one above."""
        return -1 if self.given["above"] is None else 1

    @property
    def bound(self) -> float:
        return self.given["below"] if self.sign < 0 else self.given["above"]

    @cached_property
    def gap(self) -> list[float]:
        return interval(self.own - self.base)

    @cached_property
    def reached(self) -> list[int]:
        """Runs of both arms that reach the level; the last measurement decides."""
        return [int((arm >= self.given["reaches"]).sum()) for arm in (self.own, self.base)]

    @cached_property
    def p(self) -> float:
        """One-sided p value."""
        if not self.log_rank:
            t = (self.gap[0] - self.bound) / stats.sem(self.own - self.base)
            return float(stats.t.sf(self.sign * t, len(self.own) - 1))
        if self.reached[1]:
            return Copied(self.given["p"])
        at_risk = np.arange(len(self.own), len(self.own) - self.reached[0], -1)
        share = at_risk / (at_risk + len(self.base))  # of the arm, at each of its events in turn
        return float(stats.norm.sf((1 - share).sum() / np.sqrt((share * (1 - share)).sum())))

    @property
    def exact_p(self) -> float:
        """Exact one-sided permutation p of the numbers of runs that reach the level."""
        (own, base), sizes = self.reached, (len(self.own), len(self.base))
        table = [[own, sizes[0] - own], [base, sizes[1] - base]]
        return float(stats.fisher_exact(table, alternative="greater").pvalue)

    @property
    def correlation(self) -> list[float]:
        if np.ptp(self.own) == 0 or np.ptp(self.base) == 0:
            return []
        return [float(np.corrcoef(self.own, self.base)[0, 1])]

    def verdict(self, adjusted: float) -> str:
        if adjusted < self.given["alpha"]:
            return "shown"
        if self.log_rank:
            wrong = 1 - self.p < self.given["alpha"] / 2
        else:
            wrong = self.gap[2] < self.bound if self.sign > 0 else self.gap[1] > self.bound
        return "refuted" if wrong else "underpowered"

    def reason(self, adjusted: float) -> list[float]:
        """Numbers of the sentence that gives the reason of a verdict."""
        found = list(self.gap)
        if self.log_rank:
            medians = re.findall(r"by ([\d.]+)M tokens", self.given["reason"])
            found, left = [], [Copied(float(each) * 1e6) for each in medians]
            for count, arm in zip(self.reached, (self.own, self.base), strict=True):
                found += [count, len(arm)] + ([left.pop(0)] if 2 * count >= len(arm) else [])
        return found + ([adjusted] if adjusted < self.given["alpha"] else [])

    def line(self, adjusted: float) -> list[float]:
        """Numbers of the line of the rule."""
        start = self.given["reaches"] if self.log_rank else self.bound
        found = [start, self.given["alpha"], *self.reason(adjusted)]
        found += [math.exp(x) for x in self.gap] if self.log else []
        found += [self.p] + ([adjusted] if adjusted >= self.given["alpha"] else [])
        return found + self.correlation


class Page:
    """A study's verdict.json and verdict.md."""

    def __init__(self, path: Path) -> None:
        self.json = json.loads((path / "verdict.json").read_text())
        self.arms = self.json["arms"]
        self.values = {name: np.array([*arm["values"].values()]) for name, arm in self.arms.items()}
        log = self.json["scale"] == "log"
        self.rules = [
            Rule(rule, self.values[rule["arm"]], self.values[rule["against"]], log)
            for rule in self.json["rules"]
        ]
        self.adjusted = holm([rule.p for rule in self.rules])
        for i, rule in enumerate(self.rules):
            if isinstance(rule.p, Copied):
                self.adjusted[i] = Copied(self.adjusted[i])
        self.study = (STUDIES / self.json["study"]).read_text()

    def scope(self) -> list[float]:
        """Runs, seeds, tokens, parameters, tokens per parameter, and percent between arms."""
        seeds = [len(values) for values in self.values.values()]
        tokens, sizes, ratios, apart = self.facts([*self.arms])
        apart = [x for x in apart if x]
        return [sum(seeds), seeds[0], tokens, *sizes, *ratios, *apart]

    def row(self, i: int, *result: float) -> list[float]:
        """Numbers of the row of the README on rule i: its result, then what its two arms share."""
        rule = self.rules[i]
        tokens, sizes, ratios, apart = self.facts([rule.given["arm"], rule.given["against"]])
        start = [rule.given["reaches"]] if rule.log_rank else []
        apart = [x for x in apart if x > 0.5]
        return [*start, *result, *sizes, tokens, *ratios, len(rule.own), *apart]

    def facts(self, names: list[str]) -> tuple[float, list[float], list[float], list[float]]:
        """Tokens, parameters, tokens per parameter, percent by which the largest is above the
        smallest in parameters and in FLOPs."""
        arms = [self.arms[name] for name in names]
        sizes, flops = ([arm[key] for arm in arms] for key in ("parameters", "flops_per_token"))
        ratios = [arm["tokens"] / arm["parameters"] for arm in arms]
        apart = [100 * (max(x) / min(x) - 1) for x in (sizes, flops)]
        return arms[0]["tokens"], ends(sizes), ends(ratios, 2), apart

    def power(self) -> list[float]:
        """Seeds, sd, numbers of its source, gap and power; nothing if the study states none."""
        found = re.search(r'power: {gap: ([\d.]+), sd: ([\d.]+), source: "(.*)"}', self.study)
        if not found:
            return []
        gap, sd, seeds = float(found[1]), float(found[2]), len(self.rules[0].own)
        critical = stats.t.isf(self.rules[0].given["alpha"] / len(self.rules), seeds - 1)
        power = stats.nct.sf(critical, seeds - 1, gap / (sd * math.sqrt(2 / seeds)))
        source = [Copied(parsed(each)[0]) for each in re.findall(NUMBER, found[3])]
        return [seeds, sd, *source, gap, power]

    def numbers(self) -> list[float]:
        """All numbers of the generated part of the page, in order."""
        found = self.rules[0].reason(self.adjusted[0]) + self.scope() + self.power()
        for rule, adjusted in zip(self.rules, self.adjusted, strict=True):
            found += rule.line(adjusted)
        found.append(95)
        for name, values in self.values.items():
            found += [*interval(values), len(values), self.arms[name]["diverged"], len(values)]
            found += self.arms[name]["rates"]
        return found

    def words(self) -> Iterator[str]:
        """Texts that the page must contain."""
        verdicts = [r.verdict(p) for r, p in zip(self.rules, self.adjusted, strict=True)]
        yield f"# {verdicts[0]}\n"
        yield from (f"alpha {r.given['alpha']:g}): {v};" for r, v in zip(self.rules, verdicts))
        yield f"SHA-256 `{hashlib.sha256(self.study.encode()).hexdigest()}`"
        yield f"Corpus hash `{self.json['facts']['corpus'][0]}`"


@dataclass
class Expected:
    """What a page must say."""

    numbers: list[float] = field(default_factory=list)
    """All numbers outside of quotes, in order; empty for a page that is not generated."""
    words: list[str] = field(default_factory=list)
    rows: list[tuple[str, list[float]]] = field(default_factory=list)
    """Verdict and numbers of each row of the table of claims."""
    sentences: list[tuple[str, list[float]]] = field(default_factory=list)
    """Sentences with {} for each number, and their numbers."""


def head_norm(path: Path) -> tuple[list[float], str]:
    """Return the numbers of the README's row on the head norm, and its verdict."""
    found = json.loads(path.read_text())
    logs, lengths = np.array(found["log_ratios"]), found["lengths"]
    slopes = np.polyfit(np.log(lengths), logs.T, 1)[0]
    ratios = np.exp(logs.mean(0))
    p = stats.ttest_1samp(slopes, 0, alternative="greater").pvalue
    ends = [ratios[0], lengths[0], ratios[-1], lengths[-1]]
    verdict = "shown" if p < found["alpha"] else "underpowered"
    return [*ends, *interval(slopes), 3_350_208, found["tokens"], len(slopes)], verdict


def readme_rows(pages: dict[str, Page], root: Path) -> Iterator[tuple[str, list[float]]]:
    """Yield verdict and numbers of each row of the README's table."""
    numbers, verdict = head_norm(root / "head_norm_gradients.json")
    for name, i in ROWS:
        if name == "head_norm":
            yield verdict, numbers
            continue
        page, adjusted = pages[name], pages[name].adjusted[i]
        rule = page.rules[i]
        if rule.log_rank:
            (own, base), size = rule.reached, len(rule.own)
            result = [own, size, base, size] + [adjusted] * (i > 0)
            result += [holm([each.exact_p for each in page.rules])[i]] * (i == 2)
        else:
            result = [math.exp(x) for x in rule.gap] if rule.log else rule.gap
            result = [*result, adjusted] if adjusted < rule.given["alpha"] else result
        yield rule.verdict(adjusted), page.row(i, *result)


def sentences(pages: dict[str, Page], root: Path) -> Iterator[tuple[str, str, list[float]]]:
    """Yield page, sentence with {} for each number, and its numbers, of text written by hand."""
    readme, recall, own = "README.md", "retrieval_mqar_short/verdict.md", "damping_short/verdict.md"
    damping, mqar = pages["damping_short"], pages["retrieval_mqar_short"]
    needle, v = pages["retrieval_needle_short"].values, damping.values
    gain, half, gated = ((v["standard"] - v[arm]).mean() for arm in ("v2", "half", "gated"))
    v2, base = (damping.json["learning_rates"][arm]["losses"] for arm in ("v2", "half"))
    early = [Copied(base[lr] - v2[lr]) for lr in ("0.002", "0.001", "0.004")]
    table = (root / "compare_small" / "report_diff_v2.csv").read_text().splitlines()
    (small,) = (r for r in csv.DictReader(table) if r["variant"] == "standard_half_context")
    at_flops = [Copied(small[f"gap_at_flops{end}"]) for end in ("", "_low", "_high")]
    exact, (won, lost) = [rule.exact_p for rule in mqar.rules], mqar.rules[2].reached
    for page in (readme, own):
        yield page, "V2 minus gated is {} ({} to {})", interval(v["v2"] - v["gated"])
        yield page, "gets {} of V2's gain", [100 * gated / gain]
        yield page, "V2 costs {} more training FLOPs", [damping.facts(["v2", "half"])[3][1]]
        yield page, "half minus V2 at equal FLOPs is {} ({} to {})", at_flops
        late = (v["half"] - v["v2"]).mean()
        yield page, "It was {} nats after 0.26M tokens and is {} after", [early[0], late]
    yield readme, "V2 ends {} nats per token below standard, half {}.", [gain, half]
    yield readme, "gives {} of V2's gain", [100 * half / gain]
    yield readme, "the gap after 0.26M tokens is {} and {}.", early[1:]
    for page in (readme, recall):
        found = [won, 5, lost, 5, exact[2], holm(exact)[2]]
        yield page, "{} of {} runs against {} of {} is {}; Holm's correction over", found[:5]
        yield page, "over the four rules gives {}.", found[5:]
        others = [exact[i] for i in (0, 1, 3)]
        yield page, "{} against heads, {} against standard, and {} for heads against", others
    for page in (readme, "retrieval_needle_short/verdict.md"):
        at = [interval(needle[arm]) for arm in ("standard", "half", "v2")]
        chance = 0.2 if all(low < 0.2 < high for _, low, high in at) else math.nan
        found = [chance, needle["heads"].mean()]
        yield page, "at chance, which is {}. Only heads is above it ({}).", found


def expectations(root: Path) -> dict[str, Expected]:
    """Recompute what every page below `root` must say, by the path of the page."""
    pages = {path.parent.name: Page(path.parent) for path in sorted(root.glob("*/verdict.json"))}
    found = {
        f"{name}/verdict.md": Expected(page.numbers(), [*page.words()])
        for name, page in pages.items()
    }
    found["README.md"] = Expected(rows=[*readme_rows(pages, root)])
    for page, sentence, numbers in sentences(pages, root):
        found[page].sentences.append((sentence, numbers))
    return found


def differences(text: str, expected: Expected) -> Iterator[str]:
    """Yield what differs between the text of a page and the recomputed numbers."""
    plain = re.sub(r"`[^`]*`", "", text)
    lines = plain.splitlines()
    rows = [line for line in lines if re.match(r"\| [A-Z].*\*\*", line)]
    said = re.sub(r"\s+", " ", re.sub(r"^> ?", "", plain, flags=re.M))
    pairs = [
        (row.split("|")[1].strip(), re.findall(NUMBER, row), numbers)
        for row, (_, numbers) in zip(rows, expected.rows, strict=False)
    ]
    if expected.numbers:
        generated = "\n".join(line for line in lines if not line.startswith(">"))
        pairs.append(("generated part", re.findall(NUMBER, generated), expected.numbers))
    for sentence, numbers in expected.sentences:
        match = re.search(f"({NUMBER})".join(map(re.escape, sentence.split("{}"))), said)
        if match:
            pairs.append((sentence, match.groups(), numbers))
        else:
            yield f"not on the page: {sentence}"
    for where, tokens, numbers in pairs:
        if len(tokens) != len(numbers):
            yield f"{where}: {len(tokens)} numbers, expected {len(numbers)}"
        for token, number in zip(tokens, numbers, strict=False):
            value, half = parsed(token)
            if not abs(value - number) <= half * (1 + 1e-9):
                yield f"{where}: {token} on the page, {number:.6g} recomputed"
    for words in expected.words:
        if words not in text:
            yield f"not on the page: {words.strip()}"
    if len(rows) < len(expected.rows):
        yield f"{len(rows)} rows, expected {len(expected.rows)}"
    for row, (verdict, _) in zip(rows, expected.rows, strict=False):
        if f"**{verdict}**" not in row and f"(rule: {verdict})" not in row:
            yield f"{row.split('|')[1].strip()}: its rule gives {verdict}"


def main(root: Path) -> int:
    """Check all pages; return the exit status."""
    status = 0
    for page, expected in expectations(root).items():
        numbers = [x for _, found in expected.rows + expected.sentences for x in found]
        numbers += expected.numbers
        copied = sum(isinstance(number, Copied) for number in numbers)
        problems = [*differences((root / page).read_text(), expected)]
        print(
            f"{page}: {len(numbers) - copied} numbers recomputed, {copied} copied, "
            f"{len(problems)} differ"
        )
        print("".join(f"  {problem}\n" for problem in problems), end="")
        status = status or int(bool(problems))
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent))
