"""Write the committed files of a study from its runs.

    diffllm study run conf/study/large_lr.yaml out=outputs/large_lr
    python benchmarks/study_results.py conf/study/large_lr.yaml outputs/large_lr

The script writes verdict.md, verdict.json, values.json and, if rules have gaps, gaps.svg into
benchmarks/results/<name of the study>/. Without the second argument, the script judges the
committed values of the seeds by the current rules, and writes the result as a note into verdict.md.
"""

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

from diffllm.compare.conditions import Comparand
from diffllm.compare.report.figures import RC, row_styles, to_svg
from diffllm.compare.study.arms import StudyArm
from diffllm.compare.study.decision import Tested, apply_rules
from diffllm.compare.study.differences import undeclared
from diffllm.compare.study.file import Study, load_study
from diffllm.compare.study.raw_values import values_text
from diffllm.compare.study.verdict import judge
from diffllm.compare.study.verdict_page import (
    BOUNDS,
    arm_row,
    draw_gaps_of_arms,
    exact_name,
    markdown,
)
from diffllm.statistics.estimates import Estimate

RESULTS = Path(__file__).parent / "results"
WIDTH = 620
RULES_OF = "2026-11-26"
"""Date of the last change to the rules."""


def picture(study: Study, numbers: dict[str, Any]) -> str:
    """Draw the gaps of a study's rules as a static SVG on a white background; "" without gaps.

    Args:
        numbers: content of verdict.json.
    """
    arms = {name: arm["variant"] for name, arm in numbers["arms"].items() if arm["variant"]}
    styles = row_styles([arm_row(study, name, variant) for name, variant in arms.items()])
    gaps = {
        (rule["arm"], rule["against"]): Estimate(
            rule["gap"], rule["gap_low"], rule["gap_high"], rule["seeds"]
        )
        for rule in numbers["rules"]
        if rule["gap"] is not None and rule["kind"] != "trend"
    }
    if not gaps:  # log-rank rules have no gap
        return ""
    quantity = f"{'log ' * (numbers['scale'] == 'log')}{numbers['metric']}"
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        ends = BOUNDS if "confidence" in numbers["rules"][0] else "95% interval"
        figure = draw_gaps_of_arms(gaps, styles, quantity, WIDTH, ends)
        return to_svg(figure, f"{quantity}: gaps, {ends}").decode()


def judged_again(study: Study, numbers: dict[str, Any]) -> str:
    """Return a Markdown note with the verdict of the current rules on a committed verdict.json.

    The file contains seed values and arm sizes, but no times for log-rank rules and no losses of
    documents.
    """
    arms = {
        name: StudyArm(name, arm["lr"], values={int(s): v for s, v in arm["values"].items()})
        for name, arm in numbers["arms"].items()
    }
    sizes = [
        Comparand(name, 0, {key: arm[key] for key in ("parameters", "flops_per_token", "tokens")})
        for name, arm in numbers["arms"].items()
    ]
    problems = undeclared(sizes, *study.terms)
    lines = [f"**Judged again by the rules of {RULES_OF}.**"]
    if problems:
        said = "; ".join(problem.partition(" (if the study")[0] for problem in problems)
        lines.append(f"The verdict is **not comparable**: {said}.")
        lines.append("The key `unequal` is newer than this study. The values alone give:")
    if study.rule.kind == "log_rank":
        lines.append("no test, because the tokens at which each run reached the level are lost.")
        return quoted(" ".join(lines))
    items = [f"- {outcome_line(each, study)}." for each in apply_rules(study, arms)]
    return "\n".join([quoted(" ".join(lines)), ">", *map(quoted, items)])


def outcome_line(tested: Tested, study: Study) -> str:
    """Return a rule's verdict, gap with bound, adjusted p, and p of the exact test."""
    adjusted = f", adjusted p {tested.p_adjusted:.2g}" if "adjusted" not in tested.reason else ""
    exact = f"{exact_name(study)} p {tested.showing.exact:.2g}"
    return f"{tested.verdict}: {tested.reason}{adjusted}, {exact}"


def quoted(text: str) -> str:
    mark = {"initial_indent": "> ", "subsequent_indent": "> "}
    return textwrap.fill(text, 118, break_on_hyphens=False, **mark)


def with_note(page: str, note: str) -> str:
    """Insert the note before the source of a page's claim, or replace an earlier note."""
    head, label, rest = page.partition("**Source**")
    head = re.sub(r"> \*\*Judged again.*?\n\n", "", head, flags=re.S)
    return f"{head}{note}\n\n{label}{rest}"


def main() -> None:
    study = load_study(Path(sys.argv[1]))
    place = RESULTS / study.path.stem
    if len(sys.argv) > 2:
        found = judge(study, Path(sys.argv[2]))
        numbers = {**found.numbers(), "study": study.path.name}
        place.mkdir(parents=True, exist_ok=True)
        (place / "verdict.json").write_text(
            json.dumps(numbers, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
        (place / "verdict.md").write_text(markdown(found), encoding="utf-8")
        (place / "values.json").write_text(values_text(study, found.evidence), encoding="utf-8")
        if drawn := picture(study, numbers):
            (place / "gaps.svg").write_text(drawn, encoding="utf-8")
        print(markdown(found))
    else:
        numbers, page = (
            json.loads((place / "verdict.json").read_text(encoding="utf-8")),
            place / "verdict.md",
        )
        page.write_text(
            with_note(page.read_text(encoding="utf-8"), judged_again(study, numbers)),
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
