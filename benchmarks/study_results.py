"""The committed files of a study, from its runs.

    diffllm study run conf/study/damping_short.yaml out=outputs/damping_short
    python benchmarks/study_results.py conf/study/damping_short.yaml outputs/damping_short

Writes verdict.md, verdict.json and, where rules have gaps, gaps.svg into
benchmarks/results/<name of the study>/.
"""

import json
import re
import sys
from pathlib import Path

import matplotlib

from diffllm.report.style import RC, row_styles, to_svg
from diffllm.study.file import load_study
from diffllm.study.page import draw_rules, markdown, rows_of, verdict_text
from diffllm.study.verdict import Verdict, judge

RESULTS = Path(__file__).parent / "results"
FACTS = ("device", "ranks", "torch", "compute_dtype", "corpus", "heldout_tokens")
"""Facts of run.json that are kept beside a verdict."""
WIDTH = 620
LIGHT = {"--fg": "#1b1f24", "--muted": "#5d6570", "--grid": "#e3e6ea", "--surface": "#ffffff"}
DARK = {"--fg": "#e8eaed", "--muted": "#a0a8b2", "--grid": "#2f353d", "--surface": "#191d22"}


def facts(found: Verdict) -> dict[str, list[str]]:
    """The values that the runs have of each fact."""
    runs = [run for arm in found.arms for run in arm.runs]
    return {name: sorted({str(run.facts.get(name)) for run in runs}) for name in FACTS}


def picture(found: Verdict) -> str:
    """The gaps of the study's rules as a file that follows the reader's theme."""
    styles = row_styles(rows_of(found))
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure = draw_rules(found, styles, WIDTH)
        svg = to_svg(figure, "gaps", styles, f"{found.study.quantity}: gaps, 95% intervals")
    light = {f"--r{style.index}": style.light for style in styles} | LIGHT
    dark = {f"--r{style.index}": style.dark for style in styles} | DARK
    for names in (light, dark):  # a lone row of a variant has its hue unmixed
        names |= {key: re.sub(r".*?(#\w{6}).*", r"\1", value) for key, value in names.items()}
    rules = [";".join(f"{key}:{value}" for key, value in names.items()) for names in (light, dark)]
    style = (
        f"<style>:root{{{rules[0]}}}@media(prefers-color-scheme:dark){{:root{{{rules[1]}}}}}"
        "text{font:12px system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}</style>"
        '<rect x="-10" y="-8" width="100%" height="100%" rx="6" fill="var(--surface)"/>'
    )
    start = svg.index(">") + 1
    head = svg[: start - 1].replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')
    width, height = (round(side * 72) for side in figure.get_size_inches())
    head = re.sub(r'width=.*?viewBox="[^"]*"', "", head)
    head += f' width="{width + 20}" height="{height + 16}"'
    head += f' viewBox="-10 -8 {width + 20} {height + 16}"'
    return f"{head}>{style}{svg[start:]}\n"


def main() -> None:
    study, out = load_study(Path(sys.argv[1])), Path(sys.argv[2])
    found = judge(study, out)
    numbers = {**found.numbers(), "study": study.path.name, "facts": facts(found)}
    place = RESULTS / study.path.stem
    place.mkdir(parents=True, exist_ok=True)
    (place / "verdict.json").write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n")
    (place / "verdict.md").write_text(markdown(found))
    if any(each.gap for each in found.tested):  # a log-rank test has none
        (place / "gaps.svg").write_text(picture(found))
    print(verdict_text(found))


if __name__ == "__main__":
    main()
