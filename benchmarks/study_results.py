"""Write the committed files of a study from its runs.

    diffllm study run conf/study/large_lr.yaml out=outputs/large_lr
    python benchmarks/study_results.py conf/study/large_lr.yaml outputs/large_lr

The script writes verdict.md, verdict.json, values.json and, if rules have gaps, gaps.svg into
benchmarks/results/<name of the study>/. Without the second argument, the script judges the
committed values.json by the current rules.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

from diffllm.compare.report.figures import RC, row_styles, to_svg
from diffllm.compare.study.file import Study, load_study
from diffllm.compare.study.raw_values import read_values, values_text
from diffllm.compare.study.verdict import judge, judge_evidence
from diffllm.compare.study.verdict_page import (
    BOUNDS,
    arm_row,
    draw_gaps_of_arms,
    markdown,
)
from diffllm.statistics.estimates import Estimate

RESULTS = Path(__file__).parent / "results"
WIDTH = 620


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
        figure = draw_gaps_of_arms(gaps, styles, quantity, WIDTH)
        return to_svg(figure, f"{quantity}: gaps, {BOUNDS}").decode()


def main() -> None:
    study = load_study(Path(sys.argv[1]))
    place = RESULTS / study.path.stem
    if len(sys.argv) > 2:
        found = judge(study, Path(sys.argv[2]))
    else:
        found = judge_evidence(study, read_values(study, place / "values.json"))
    numbers = {**found.numbers(), "study": study.path.name}
    texts = {
        "verdict.json": json.dumps(numbers, indent=1, allow_nan=False) + "\n",
        "verdict.md": markdown(found),
    }
    if len(sys.argv) > 2:
        texts["values.json"] = values_text(study, found.evidence)
    if drawn := picture(study, numbers):
        texts["gaps.svg"] = drawn
    place.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (place / name).write_text(text, encoding="utf-8")
    print(markdown(found))


if __name__ == "__main__":
    main()
