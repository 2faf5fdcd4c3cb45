"""Write the committed files of a study from its runs.

    diffllm study run conf/study/damping_short.yaml out=outputs/damping_short
    python benchmarks/study_results.py conf/study/damping_short.yaml outputs/damping_short

The script writes verdict.md, verdict.json, values.json and, if rules have gaps, gaps.svg into
benchmarks/results/<name of the study>/. Without the second argument it draws gaps.svg again from
the committed verdict.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

from diffllm.compare.report.figures import RC, row_styles, to_svg
from diffllm.compare.report.rows import Row
from diffllm.compare.study.file import load_study
from diffllm.compare.study.raw_values import values_text
from diffllm.compare.study.verdict import judge
from diffllm.compare.study.verdict_page import draw_rules, markdown
from diffllm.statistics.estimates import Estimate

RESULTS = Path(__file__).parent / "results"
WIDTH = 620


def picture(numbers: dict[str, Any]) -> str:
    """Draw the gaps of a study's rules as a static SVG on a white background; "" without gaps.

    Args:
        numbers: content of verdict.json.
    """
    arms = {name: arm["variant"] for name, arm in numbers["arms"].items() if arm["variant"]}
    styles = row_styles([Row(name, {"attention": variant}, []) for name, variant in arms.items()])
    gaps = {
        (rule["arm"], rule["against"]): Estimate(
            rule["gap"], rule["gap_low"], rule["gap_high"], rule["seeds"]
        )
        for rule in numbers["rules"]
        if rule["gap"] is not None and rule["kind"] != "trend"
    }
    if not gaps:  # a log-rank test has none
        return ""
    quantity = f"{'log ' * (numbers['scale'] == 'log')}{numbers['metric']}"
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure = draw_rules(gaps, styles, quantity, WIDTH)
        return to_svg(figure, f"{quantity}: gaps with one-sided bounds").decode()


def main() -> None:
    study = load_study(Path(sys.argv[1]))
    place = RESULTS / study.path.stem
    if len(sys.argv) > 2:
        found = judge(study, Path(sys.argv[2]))
        numbers = {**found.numbers(), "study": study.path.name}
        place.mkdir(parents=True, exist_ok=True)
        (place / "verdict.json").write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n")
        (place / "verdict.md").write_text(markdown(found))
        (place / "values.json").write_text(values_text(study, found.evidence))
        print(markdown(found))
    if drawn := picture(json.loads((place / "verdict.json").read_text())):
        (place / "gaps.svg").write_text(drawn)


if __name__ == "__main__":
    main()
