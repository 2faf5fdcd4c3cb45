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

import matplotlib

from diffllm.compare.report.figures import RC, to_svg
from diffllm.compare.study.file import load_study
from diffllm.compare.study.raw_values import read_values, values_text
from diffllm.compare.study.verdict import Verdict, judge, judge_evidence
from diffllm.compare.study.verdict_page import (
    BOUNDS_LABEL,
    gaps_drawing,
    gaps_of_pairs,
    verdict_page,
)

RESULTS = Path(__file__).parent / "results"
WIDTH = 620


def picture(verdict: Verdict) -> str:
    """Draw the gaps of a study's rules as a static SVG on a white background; "" without gaps."""
    if not gaps_of_pairs(verdict):  # log-rank rules have no gap
        return ""
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        title = f"{verdict.study.quantity}: gaps, {BOUNDS_LABEL}"
        return to_svg(gaps_drawing(verdict, WIDTH), title).decode()


def main() -> None:
    study = load_study(Path(sys.argv[1]))
    place = RESULTS / study.path.stem
    if len(sys.argv) > 2:
        verdict = judge(study, Path(sys.argv[2]))
    else:
        verdict = judge_evidence(study, read_values(study, place / "values.json"))
    page = verdict_page(verdict, with_picture=False)
    numbers = {**verdict.numbers(), "study": study.path.name}
    texts = {
        "verdict.json": json.dumps(numbers, indent=1, allow_nan=False) + "\n",
        "verdict.md": page.markdown(),
    }
    if len(sys.argv) > 2:
        texts["values.json"] = values_text(study, verdict.evidence)
    if drawn := picture(verdict):
        texts["gaps.svg"] = drawn
    place.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (place / name).write_text(text, encoding="utf-8")
    print(page.text())


if __name__ == "__main__":
    main()
