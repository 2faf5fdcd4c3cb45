"""The report page in a browser: no script error, nothing wider than the window, working controls.

One page shows all reports in frames of the wanted widths and themes and asks them questions.
"""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import sample_comparison as sample

from diffllm.compare.report.evaluations import Cell, Evaluated, ScoreLine
from diffllm.compare.report.page import page
from diffllm.statistics.estimates import Estimate

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

LISTENERS = """<script>
window.errors = [];
window.onerror = (message) => { errors.push(String(message)); };
console.error = (...said) => { errors.push(said.join(" ")); };
document.addEventListener("securitypolicyviolation", (e) => errors.push(e.violatedDirective));
</script>"""
HARNESS = """<!DOCTYPE html><meta name="color-scheme" content="light dark">
<body style="margin:0">FRAMES<script>
const shown = (element) => element.getClientRects().length > 0;
function overlaps(svg) {
  const boxes = [...svg.querySelectorAll("text")].filter(shown).map((text) =>
    [text.textContent, text.getBoundingClientRect()]);
  return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
    Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1 &&
    Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 3).map(([b]) => `${a} on ${b}`));
}
function ask(page, view) {
  const all = (selector) => [...page.querySelectorAll(selector)];
  const root = page.documentElement;
  const answers = {
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
    background: view.getComputedStyle(page.body).backgroundColor,
    text: view.getComputedStyle(all("figure svg text")[0]).fill,
    wide: root.scrollWidth, inner: view.innerWidth,
    figures: all("figure").length,
    beyond: all("figure svg, h1, h3, h4, figcaption, .box").filter((element) => shown(element) &&
      element.getBoundingClientRect().right > view.innerWidth).length,
    overlaps: all("figure svg").flatMap(overlaps),
    widths: new Set(all(".figures > figure").map((f) =>
      Math.round(root.clientWidth / f.getBoundingClientRect().width))).size,
    scrolled: all(".scroll").filter((box) => shown(box) && box.scrollWidth > box.clientWidth + 1)
      .map((box) => `${box.getAttribute("aria-labelledby")} ${box.scrollWidth - box.clientWidth}`),
    wideFigures: all("figure:not(.panels), .panels svg").filter((figure) =>
      figure.getBoundingClientRect().width > 421).length,
    sizes: [...new Set(all("figure svg:not(.swatch) text").filter(shown).map((text) =>
      (parseFloat(view.getComputedStyle(text).fontSize) * text.getScreenCTM().a).toFixed(1)))],
    folded: all("details:not([open]) figure h3").map((h3) => h3.textContent),
  };
  const titled = (title) => all("figure").find((f) => f.querySelector("h3")?.textContent === title);
  const pointed = (title, share) => {
    const svg = titled(title)?.querySelector("svg[data-x]");
    if (!svg) return null;
    const [, p, , q] = svg.dataset.x.split(" ").map(Number);
    const box = svg.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    const [, bottom, , top] = svg.dataset.y.split(" ").map(Number);
    const clientX = box.left + (p + share * (q - p)) * scale;
    const clientY = box.top + (bottom + 0.99 * (top - bottom)) * scale;
    svg.dispatchEvent(new view.PointerEvent("pointermove", { clientX, clientY }));
    const said = page.getElementById("values");
    const lines = said.hidden ? null : [...said.children].map((line) => line.textContent);
    svg.dispatchEvent(new view.PointerEvent("pointerleave"));
    return said.hidden ? lines : "still there";
  };
  answers.pointed = {
    loss: pointed("Held-out loss", 1), gap: pointed("Gap to standard over training", 1),
    layers: pointed("Kurtosis, by layer", 1),
    map: pointed("Mean context RMS, by layer and time", 1),
  };
  const headers = all("#main thead th");
  const labels = () => all("#main tbody th").map((th) => th.dataset.order);
  answers.unsorted = labels();
  answers.sorted = headers.map((header) => {
    header.querySelector("button").click();
    const ascending = [header.getAttribute("aria-sort"), labels()];
    header.querySelector("button").click();
    return [header.textContent, ascending, [header.getAttribute("aria-sort"), labels()]];
  });
  const box = page.getElementById("show-1");
  if (box) {
    const drawn = (row) =>
      all(`figure ${row}`).filter((e) => shown(e) && !e.closest("[data-always]")).length;
    const lines = () => [drawn(".row-0"), drawn(".row-1")];
    answers.lines = [lines()];
    box.click();
    answers.lines.push(lines());
    box.click();
    answers.lines.push(lines());
  }
  answers.errors = view.errors;
  return answers;
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
PAIRS = (4, 8, 16)
ODD = {
    make.__name__: make
    for make in (sample.hostile, sample.barely_started, sample.not_finite, sample.incomparable)
}
VIEWS = [(FOUR, width, dark) for width in (360, 1400) for dark in (False, True)]
VIEWS += [(name, 360, False) for name in ODD]


def asked(folder: Path, texts: dict[str, str], views: Any = None) -> dict[Any, dict]:
    """Every view's answers; a view is (page, width, dark)."""
    views = views or VIEWS
    files = {name: f"{i}.html" for i, name in enumerate(texts)}
    for name, text in texts.items():
        assert "<head>" in text
        (folder / files[name]).write_text(text.replace("<head>", "<head>" + LISTENERS, 1))
    frames = [
        FRAME.format(file=files[name], width=width, theme="dark" if dark else "light")
        for name, width, dark in views
    ]
    (folder / "harness.html").write_text(HARNESS.replace("FRAMES", "".join(frames)))
    flags = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --allow-file-access-from-files "
        f"--virtual-time-budget=60000 --window-size=1500,1000 --user-data-dir={folder / 'profile'} "
        "--dump-dom"
    )
    done = subprocess.run(
        [str(CHROMIUM), *flags.split(), f"file://{folder / 'harness.html'}"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result, f"{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    return dict(zip(views, json.loads(unescape(result[1])), strict=True))


@pytest.fixture(scope="module")
def comparison():
    made = sample.compared(sample.FOUR, 2, 40, probes=True)
    made.evaluated = [mqar(len(made.rows))]
    return made


def mqar(rows: int) -> Evaluated:
    """Shares of right answers at 4, 8 and 16 pairs."""
    levels = {f"pairs {n}": {"value": 2 / n, "chance": 1 / n, "level": {"pairs": n}} for n in PAIRS}
    cells = [Cell(Estimate(0.5), None)] * rows
    lines = [ScoreLine(of, score["chance"], cells) for of, score in levels.items()]
    return Evaluated("mqar", "share of right answers", lines, [])


@pytest.fixture(scope="module")
def views(comparison, tmp_path_factory):
    texts = {FOUR: page(comparison), **{name: page(make()) for name, make in ODD.items()}}
    return asked(tmp_path_factory.mktemp("pages"), texts)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_fits_follows_the_theme_and_responds(comparison, views, width, dark):
    answers = views[FOUR, width, dark]
    assert isinstance(answers, dict), answers
    assert answers["errors"] == []
    assert answers["inner"] == width
    assert answers["wide"] <= width
    assert answers["beyond"] == 0
    assert answers["overlaps"] == []
    assert answers["figures"] > 20
    assert answers["widths"] == (1 if width == 360 else 2)
    assert answers["scrolled"] == []
    assert answers["wideFigures"] == 0
    assert len(answers["sizes"]) == 1
    assert len(answers["folded"]) == 3
    assert all(title.startswith("Gradient norm, ") for title in answers["folded"])
    assert answers["dark"] == dark
    brightness = [sum(map(int, re.findall(r"\d+", answers[k])[:3])) for k in ("background", "text")]
    assert (brightness[0] < 100 < 600 < brightness[1]) == dark
    assert (brightness[1] < 100 < 600 < brightness[0]) != dark

    labels = [row.label for row in comparison.rows]
    assert answers["unsorted"] == labels
    for title, ascending, descending in answers["sorted"]:
        assert (ascending[0], descending[0]) == ("ascending", "descending"), title
        assert sorted(ascending[1]) == sorted(descending[1]) == sorted(labels)
    by_title = {title: (up[1], down[1]) for title, up, down in answers["sorted"]}
    assert by_title["Row"] == (sorted(labels), sorted(labels, reverse=True))
    by_loss = [r.label for r in sorted(comparison.rows, key=lambda r: r.loss.mean)]
    up, down = next(v for title, v in by_title.items() if title.startswith("Held-out loss"))
    assert (up, down) == (by_loss, by_loss[::-1])
    up, down = next(v for title, v in by_title.items() if title.startswith("Gap to"))
    assert up[-1] == down[-1] == "standard"

    (all_0, all_1), (left_0, left_1), again = answers["lines"]
    assert all_0 > 10
    assert all_1 > 10
    assert (left_0, left_1) == (all_0, 0)
    assert again == [all_0, all_1]


def test_pointing_at_a_figure_shows_values_and_runs(comparison, views):
    for view in ((FOUR, 360, False), (FOUR, 1400, False)):
        said = views[view]["pointed"]
        for name, of in (("loss", lambda row: row.runs), ("gap", lambda row: row.gap and row.runs)):
            head, *lines = said[name]
            assert head == "6.55M tokens"
            assert len(lines) == sum(bool(of(row)) for row in comparison.rows)
        by_label = {line.split()[0]: line for line in said["loss"][1:]}
        for row in comparison.rows:
            ends = [run.series("eval/loss").values[-1] for run in row.runs]
            last = by_label[row.label]
            shown = [float(x) for x in re.findall(r"\d\.\d{2,3}", last)]
            assert sorted(shown) == pytest.approx(sorted([*ends, sum(ends) / 2]), abs=0.002)
        assert sum("mean of 2 seeds" in line for line in said["loss"]) == 1  # of the nearest
        assert said["layers"][0] == "layer 7"
        assert re.fullmatch(r"layer 7, .* tokens\d.*", said["map"][0])


@pytest.mark.parametrize("name", ODD)
def test_odd_pages_fit_a_phone(views, name):
    answers = views[name, 360, False]
    assert isinstance(answers, dict), answers
    assert answers["errors"] == []
    assert answers["scrolled"] == []
    assert answers["wide"] <= 360
    assert answers["beyond"] == 0
    assert answers["overlaps"] == []
