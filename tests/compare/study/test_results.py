"""Committed results: pages against recomputed numbers, figures without style sheets."""

import importlib.util
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from runs.json_files import read_json, write_json
from runs.written import edit_text, study_file, write_arms

from diffllm.compare.study.file import load_study
from diffllm.compare.study.raw_values import read_values
from diffllm.compare.study.verdict import Verdict, judge_evidence

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
STUDIES = ROOT / "conf" / "study"
PAGES = ["README.md", *sorted(f"{p.parent.name}/verdict.md" for p in RESULTS.glob("*/verdict.md"))]


def load(path):
    """Import a script of benchmarks/."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


# Scripts import their neighbours.
sys.path[:0] = [str(RESULTS), str(ROOT / "benchmarks")]
recompute = load(RESULTS / "recompute.py")


def expected_of(place):
    page = recompute.Page(place / "verdict.json")
    return page.raw.expected(page.json)


def recompute_command(root):
    """Run the script on a directory of results."""
    command = [sys.executable, str(RESULTS / "recompute.py"), str(root)]
    return subprocess.run(command, capture_output=True, encoding="utf-8")


def assert_changed_digits_are_detected(text, spans, expectation):
    """Change the last digit of each number of a page.

    Args:
        spans: start and end of the numbers in `text`.
    """
    for start, end in spans:
        place = max(i for i in range(start, end) if text[i].isdigit())
        changed = f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}"
        assert [*recompute.differences(changed, expectation)], text[start - 40 : end + 20]


@pytest.fixture(scope="module")
def expectations():
    return recompute.expectations(RESULTS)


def test_numbers_on_result_pages_match_independent_recomputation(tmp_path):
    result = recompute_command(RESULTS)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = [line.partition(":")[0] for line in result.stdout.splitlines()]
    assert pages == [*PAGES[1:], PAGES[0]]
    for script in RESULTS.glob("*.py"):
        assert "import diffllm" not in script.read_text(encoding="utf-8")

    copy = shutil.copytree(RESULTS, tmp_path / "results")
    edit_text(copy / "damping_2" / "verdict.md", "| v2 | 4.1782 |", "| v2 | 4.1783 |")
    result = recompute_command(copy)
    assert result.returncode == 1
    assert "v2: 4.1783 on the page, 4.1782" in result.stdout


@pytest.mark.parametrize("page", PAGES)
def test_recomputation_detects_any_changed_digit_of_result_page(page, expectations):
    text = (RESULTS / page).read_text(encoding="utf-8")
    expectation = expectations[page]
    assert not [*recompute.differences(text, expectation)]
    hidden = re.sub(r"`[^`]*`", lambda result: "." * len(result[0]), text)
    # in pages written by hand, recompute.py checks the rows of the table, and sentences by name
    # in pages with values.json, it checks tables, gaps and bounds, but not p
    checked, least = r"^[^>\n].*$", 70
    if page == "README.md":
        checked = r"^\| .*\*\*.*$"
    elif expectation.tables:
        rows = "|".join(re.escape(name) for name, _ in expectation.tables)
        checked = rf"^\| ({rows}) \|.*$"
        least = sum(len(numbers) for _, numbers in expectation.tables)
    spans = [
        (line.start() + result.start(), line.start() + result.end())
        for line in re.finditer(checked, hidden, re.M)
        for result in re.finditer(recompute.NUMBER, line[0])
    ]
    assert len(spans) >= least
    assert_changed_digits_are_detected(text, spans, expectation)
    for sentence, numbers in expectation.sentences:
        other = recompute.Expected(
            rows=expectation.rows, sentences=[(sentence, [2 * x + 1 for x in numbers])]
        )
        plain = re.sub(r"\s+", " ", re.sub(r"^> ?", "", hidden, flags=re.M))
        expected_count = len(numbers) * len(recompute.occurrences(sentence, plain))
        assert len([*recompute.differences(text, other)]) == expected_count > 0, sentence


def test_tables_of_results_page_equal_tables_written_by_engine(monkeypatch, capsys):
    """Each cell is written from values.json by the rules of the studies."""
    script = load(ROOT / "benchmarks" / "results_tables.py")
    monkeypatch.setattr(sys, "argv", ["results_tables.py", "--check"])
    assert script.main() == 0, capsys.readouterr().out


def test_changed_cell_of_results_page_is_found_and_written_again(tmp_path, monkeypatch, capsys):
    script = load(ROOT / "benchmarks" / "results_tables.py")
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    page = tmp_path / "README.md"
    page.write_text(text.replace("| V1 after 0 steps |", "| V1 after 9 steps |"), encoding="utf-8")
    gradients = text.partition("<!-- table: gradients -->\n\n")[2].partition("\n\n")[0]
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(script, "tables", lambda: {"gradients": gradients})
    monkeypatch.setattr(sys, "argv", ["results_tables.py", "--check"])
    assert script.main() == 1
    assert "+| V1 after 0 steps |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["results_tables.py"])
    assert script.main() == 0
    assert page.read_text(encoding="utf-8") == text


def test_recomputation_detects_every_changed_verdict_or_loss(tmp_path, expectations):
    name = "damping_2/verdict.md"
    text = (RESULTS / name).read_text(encoding="utf-8")
    shown = text.replace("half the context: shown", "half the context: refuted")
    assert len([*recompute.differences(shown, expectations[name])]) == 1
    copy = shutil.copytree(RESULTS, tmp_path / "results")
    path = copy / "damping_2" / "verdict.json"
    numbers = read_json(path)
    numbers["arms"]["v2"]["values"]["13"] += 0.01
    write_json(path, numbers)
    assert [*recompute.differences(text, recompute.expectations(copy)[name])]


def published(name: str) -> Verdict:
    study = load_study(STUDIES / f"{name}.yaml")
    return judge_evidence(study, read_values(study, RESULTS / name / "values.json"))


def test_result_figures_have_fixed_colours_and_white_background():
    picture = load(ROOT / "benchmarks" / "study_results.py").picture
    drawn = picture(published("damping_2"))
    figures = {
        path.parent.name: path.read_text(encoding="utf-8") for path in RESULTS.glob("*/*.svg")
    }
    for name, svg in {**figures, "drawn": drawn}.items():
        assert "var(" not in svg, name
        assert "#ffffff" in svg, name
    root = ET.fromstring(drawn)
    labels = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"v2 − half", "v2 − gated", "v2 − fixed"} <= labels
    assert picture(published("retrieval_mqar")) == "", "log-rank rules have no gap"


def test_recomputation_detects_changed_digit_on_page_of_new_study(tmp_path, monkeypatch):
    rule = "{kind: difference, arm: v2, against: half, below: 0.0}"
    study = study_file(tmp_path / "own.yaml", rule)
    losses = {"standard": [4.5, 4.52, 4.51], "half": [4.4, 4.41, 4.39], "v2": [4.3, 4.312, 4.289]}
    write_arms(study, tmp_path / "out", losses)
    script = load(ROOT / "benchmarks" / "study_results.py")
    monkeypatch.setattr(script, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["study_results.py", str(study.path), str(tmp_path / "out")])
    script.main()
    place = tmp_path / "results" / "own"
    text = (place / "verdict.md").read_text(encoding="utf-8")
    expectation = expected_of(place)
    assert not [*recompute.differences(text, expectation)]
    rows = (
        r"^\| (?:standard|half|v2) (\|.*)$|(?<=v2 minus half is )(\S+)|(?<=95% upper bound )([^,]+)"
    )
    spans = [
        (line.start(line.lastindex) + result.start(), line.start(line.lastindex) + result.end())
        for line in re.finditer(rows, text, re.M)
        for result in re.finditer(recompute.NUMBER, line[line.lastindex])
    ]
    assert len(spans) == 3 * 11 + 2 * 2
    assert_changed_digits_are_detected(text, spans, expectation)
    values = read_json(place / "values.json")
    values["runs"][0]["value"] += 0.01
    write_json(place / "values.json", values)
    expectation = expected_of(place)
    assert len([*recompute.differences(text, expectation)]) >= 2
