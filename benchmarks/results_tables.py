"""Write the tables of benchmarks/results/README.md from the committed values of each seed.

    python benchmarks/results_tables.py [--check]

The rules of each study are applied to its values.json as in `study verdict`. A table follows the
line <!-- table: NAME -->. With --check, the script writes nothing, and exits with status 1 if a
table differs from the committed one.
"""

import csv
import difflib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gradients import PAIRS

from diffllm.compare.arms.sentences import ascii_minus, compact, fixed, percent, with_interval
from diffllm.compare.study.arms import StudyArm
from diffllm.compare.study.decision import NO_LONGER_JUDGED
from diffllm.compare.study.file import load_study
from diffllm.compare.study.raw_values import read_values
from diffllm.compare.study.verdict import NOT_COMPARABLE, Verdict, judge_evidence
from diffllm.statistics.estimates import Estimate

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = RESULTS / "README.md"
STUDIES = ("retrieval_mqar", "large_lr", "damping_2", "equal_time")
LABELS = {"v1": "V1", "v2": "V2"}
"""Names of arms that differ from those in the study files."""
QUANTITIES = {
    "heldout_loss": "loss", "lr_sensitivity": "sensitivity to the learning rate",
    "tasks/mqar": "recall",
}  # fmt: skip
FACTS = {"parameters": "parameters", "flops_per_token": "FLOPs per token", "tokens": "tokens"}
SMALLEST_DIFFERENCE = 0.005
"""Relative difference between arms above which the table names it."""
VERDICT_HEADS = (
    "Study", "Claim, as tested by its rule", "Verdict", "Result", "Adjusted p", "Parameters",
    "Tokens", "Seeds", "Difference",
)  # fmt: skip
RATE_HEADS = (
    "Arm", "Sensitivity", "Diverged", "Best rate", "Loss there", "Loss spikes", "Gradient spikes",
)  # fmt: skip
GRADIENT_HEADS = (
    "The ratio rises with length", "Verdict", "128 tokens", "4,096 tokens", "Slope of logarithms",
    "Adjusted p",
)  # fmt: skip


def label(arm: str) -> str:
    return LABELS.get(arm, arm)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("| --- ", "|---") for cells in lines)


def claim_words(rule: Mapping[str, Any], quantity: str) -> str:
    arm, against = label(rule["arm"]), label(rule["against"])
    if rule["kind"] == "log_rank":
        return f"{arm} reaches {quantity} {rule['reaches']:g} in fewer tokens than {against}"
    if rule["kind"] == "equivalence":
        return f"{arm} and {against} have equal {quantity}, within ±{rule['margin']:g}"
    side = "lower" if rule["above"] is None else "higher"
    return f"{arm} has a {side} {quantity} than {against}"


def result_words(rule: Mapping[str, Any], arms: Mapping[str, StudyArm]) -> str:
    if rule["kind"] == "log_rank":
        times = [arms[name].times(rule["reaches"]) for name in (rule["arm"], rule["against"])]
        reached, other = (f"{arm.count} of {len(arm.tokens)}" for arm in times)
        return f"{reached} runs against {other}"
    gap = Estimate(rule["gap"], rule["gap_low"], rule["gap_high"], rule["seeds"])
    return ascii_minus(with_interval(gap, signed=True))


def verdict_words(verdict: str, rule: Mapping[str, Any]) -> str:
    if verdict == NOT_COMPARABLE:
        return f"**{verdict}** (rule: {rule['verdict']})"
    return f"**{rule['verdict']}**"


def p_words(rule: Mapping[str, Any]) -> str:
    """Return the adjusted p of the claim, or of the opposite claim if the claim is refuted."""
    if rule["verdict"] == "refuted":
        return f"{rule['p_adjusted_refuting']:.2g} (opposite)"
    return f"{rule['p_adjusted']:.2g}"


def range_words(values: Iterable[float], digits: int = 4) -> str:
    values = list(values)
    return " to ".join(dict.fromkeys(compact(x, digits) for x in (min(values), max(values))))


def difference_words(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """Name each fact in which two arms differ, the arm with more of it, and by how much."""
    words = []
    for fact, name in FACTS.items():
        less, more = sorted(arms, key=lambda arm: arms[arm][fact])
        share = arms[more][fact] / arms[less][fact] - 1
        if share > SMALLEST_DIFFERENCE:
            words.append(f"{name}: {label(more)} +{percent(share)}")
    return ", ".join(words) or "none"


def verdict_rows(verdict: Verdict) -> Iterator[list[str]]:
    """Yield a row per rule; rules that are no longer judged have none."""
    study, numbers = verdict.study, verdict.numbers()
    name = study.path.stem
    for rule in numbers["rules"]:
        if rule["verdict"] == NO_LONGER_JUDGED:
            continue
        arms = {arm: numbers["arms"][arm] for arm in (rule["arm"], rule["against"])}
        tokens = range_words(arm["tokens"] for arm in arms.values())
        ratios = range_words((arm["tokens"] / arm["parameters"] for arm in arms.values()), 2)
        yield [
            f"[{name}]({name}/verdict.md)",
            claim_words(rule, QUANTITIES[study.metric]),
            verdict_words(numbers["verdict"], rule),
            result_words(rule, {arm.label: arm for arm in verdict.arms}),
            p_words(rule),
            range_words(arm["parameters"] for arm in arms.values()),
            f"{tokens} ({ratios})",
            f"{len(study.seeds)}",
            difference_words(arms),
        ]


def rate_rows(verdict: Verdict) -> Iterator[list[str]]:
    """Yield a row per arm of a study with `lr_sweep`; report.csv has the numbers of spikes."""
    text = (RESULTS / verdict.study.path.stem / "report.csv").read_text(encoding="utf-8")
    report = list(csv.DictReader(text.splitlines()))
    for arm in verdict.arms:
        losses: dict[float, list[float]] = {}
        for run in arm.runs:
            losses.setdefault(run.lr, []).append(math.inf if run.loss is None else run.loss)
        means = {rate: sum(values) / len(values) for rate, values in losses.items()}
        best = min(means, key=lambda rate: means[rate])
        events = []
        for kind in ("loss_events", "grad_events"):
            counts = [float(row[kind]) for row in report if row["variant"] == arm.runs[0].variant]
            events.append(f"{sum(counts):.0f}")
        sensitivity = arm.mean.mean if arm.mean else None
        diverged = f"{arm.diverged} of {len(arm.runs)}"
        best_words = f"{best:g}", fixed(means[best], 3)
        yield [label(arm.label), fixed(sensitivity, 3), diverged, *best_words, *events]


def gradient_rows() -> Iterator[list[str]]:
    """Yield a row per rule of gradients.py: verdict, ratios at the ends, slope and p."""
    content = json.loads((RESULTS / "gradients.json").read_text(encoding="utf-8"))
    matrix = content["matrices"].index("wo")
    for rule in content["rules"]:
        step = content["steps"].index(rule["step"])
        with_norm, without = (np.array(content["norms"][name]) for name in PAIRS[rule["pair"]])
        logs = np.log(with_norm / without)[step, ..., matrix]  # seeds, lengths
        ratios = np.exp(logs.mean(axis=0))
        slope = Estimate(rule["slope"], rule["slope_low"], rule["slope_high"])
        yield [
            f"{rule['pair']} after {rule['step']:,} steps",
            f"**{rule['verdict']}**",
            *(f"{ratio:.2f} times" for ratio in (ratios[0], ratios[-1])),
            ascii_minus(with_interval(slope, signed=True, digits=3)),
            f"{rule['p_adjusted']:.2g}",
        ]


def tables() -> dict[str, str]:
    """Return the tables of the page as Markdown, by name."""
    verdicts = {}
    for name in STUDIES:
        study = load_study(ROOT / "conf" / "study" / f"{name}.yaml")
        values = read_values(study, RESULTS / name / "values.json")
        verdicts[name] = judge_evidence(study, values)
    rows = [row for verdict in verdicts.values() for row in verdict_rows(verdict)]
    return {
        "verdicts": markdown_table(VERDICT_HEADS, rows),
        "large_lr": markdown_table(RATE_HEADS, rate_rows(verdicts["large_lr"])),
        "gradients": markdown_table(GRADIENT_HEADS, gradient_rows()),
    }


def with_table(page: str, name: str, table: str) -> str:
    """Return the page with a table in place of the present one, which ends at an empty line."""
    mark = f"<!-- table: {name} -->\n"
    before, _, rest = page.partition(mark)
    if not rest:
        raise ValueError(f"{PAGE} has no line {mark.strip()}")
    after = rest.lstrip("\n").partition("\n\n")[2]
    return f"{before}{mark}\n{table}\n\n{after}"


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    written = page
    for name, table in tables().items():
        written = with_table(written, name, table)
    if "--check" not in sys.argv:
        PAGE.write_text(written, encoding="utf-8")
        return 0
    for line in difflib.unified_diff(page.splitlines(), written.splitlines(), lineterm="", n=0):
        print(line)
    return int(written != page)


if __name__ == "__main__":
    sys.exit(main())
