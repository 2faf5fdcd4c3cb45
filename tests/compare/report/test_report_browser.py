"""The layout of reports and of a verdict page in a browser: nothing is wider than the window.

A single page loads all pages in frames of given widths and themes, and measures each frame.
"""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
import sample_comparison as sample

from diffllm.compare.report.report_page import page
from diffllm.compare.study.file import load_study
from diffllm.compare.study.raw_values import read_values
from diffllm.compare.study.verdict import judge_evidence
from diffllm.compare.study.verdict_page import verdict_page

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

HARNESS = """<!DOCTYPE html><meta name="color-scheme" content="light dark">
<body style="margin:0">FRAMES<script>
const shown = (element) => element.getClientRects().length > 0;
function ask(page, view) {
  const all = (selector) => [...page.querySelectorAll(selector)];
  const right = (element) => element.getBoundingClientRect().right;
  return {
    background: view.getComputedStyle(page.body).backgroundColor,
    text: view.getComputedStyle(page.body).color,
    wide: page.documentElement.scrollWidth, inner: view.innerWidth,
    figures: all("figure img").length,
    short: all(".figures").filter((grid) => shown(grid) &&
      right(grid.lastElementChild) < right(grid) - 1).length,
    broken: all("figure img").filter((image) => shown(image) && !image.naturalWidth).length,
    beyond: all("figure, figure:not(.wide) img, h1, h3, h4, figcaption, .box").filter((element) =>
      shown(element) && right(element) > view.innerWidth).length,
    scrolled: all(".scroll").filter((box) => shown(box) && box.scrollWidth > box.clientWidth + 1)
      .map((box) => `${box.getAttribute("aria-label")} ${box.scrollWidth - box.clientWidth}`),
    folded: all("details:not([open]) figure h3").map((h3) => h3.textContent),
  };
}
window.onload = () => {
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify([...document.querySelectorAll("iframe")].map((frame) => {
    try { return ask(frame.contentDocument, frame.contentWindow); }
    catch (error) { return String(error); }
  }));
  document.body.append(result);
};
</script>"""
FRAME = """<iframe src="{file}" style="border:0;display:block;width:{width}px;height:900px;
color-scheme:{theme}"></iframe>"""

FOUR = "four variants"
ODD = {
    make.__name__: make
    for make in (sample.hostile, sample.barely_started, sample.not_finite, sample.incomparable)
}
VIEWS = [(FOUR, width, dark) for width in (360, 900, 1400) for dark in (False, True)]
VIEWS += [(name, 360, False) for name in (*ODD, "verdict")]


def published_verdict() -> str:
    """Return the verdict page of a published study with long overrides, hashes and sentences."""
    root = Path(__file__).parents[3]
    study = load_study(root / "conf/study/damping_2.yaml")
    values = root / "benchmarks/results/damping_2/values.json"
    return verdict_page(judge_evidence(study, read_values(study, values))).html()


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    """Return the measurements of every view; a view is (page, width, dark)."""
    folder = tmp_path_factory.mktemp("pages")
    comparisons = {FOUR: lambda: sample.comparison_of(sample.FOUR, 2, 40, probes=True), **ODD}
    pages = {name: page(make()) for name, make in comparisons.items()}
    pages["verdict"] = published_verdict()
    files = {name: f"{i}.html" for i, name in enumerate(pages)}
    for name, html in pages.items():
        (folder / files[name]).write_text(html, encoding="utf-8")
    frames = [
        FRAME.format(file=files[name], width=width, theme="dark" if dark else "light")
        for name, width, dark in VIEWS
    ]
    (folder / "harness.html").write_text(
        HARNESS.replace("FRAMES", "".join(frames)), encoding="utf-8"
    )
    flags = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --allow-file-access-from-files "
        f"--virtual-time-budget=60000 --window-size=1500,1000 --user-data-dir={folder / 'profile'} "
        "--dump-dom"
    )
    done = subprocess.run(
        [str(CHROMIUM), *flags.split(), f"file://{folder / 'harness.html'}"],
        capture_output=True,
        encoding="utf-8",
        timeout=240,
    )
    result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result, f"{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    return dict(zip(VIEWS, json.loads(unescape(result[1])), strict=True))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 900, 1400])
def test_report_page_fits_browser_width_in_light_and_dark_theme(views, width, dark):
    answers = views[FOUR, width, dark]
    assert isinstance(answers, dict), answers
    assert answers["inner"] == width
    assert answers["wide"] <= width
    assert answers["beyond"] == answers["broken"] == 0
    assert answers["scrolled"] == []
    assert answers["short"] == 0
    assert answers["figures"] > 20
    assert len(answers["folded"]) == 3
    assert all(title.startswith("Gradient norm, ") for title in answers["folded"])
    brightness = [sum(map(int, re.findall(r"\d+", answers[k])[:3])) for k in ("background", "text")]
    assert (brightness[0] < 100 < 600 < brightness[1]) == dark
    assert (brightness[1] < 100 < 600 < brightness[0]) != dark


@pytest.mark.parametrize("name", [*ODD, "verdict"])
def test_page_with_unusual_content_fits_narrow_screen(views, name):
    answers = views[name, 360, False]
    assert isinstance(answers, dict), answers
    assert answers["wide"] <= 360
    assert answers["beyond"] == answers["broken"] == 0
    assert answers["scrolled"] == []
