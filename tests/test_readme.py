"""Documentation: length of the README, links, and generated pages."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import diffllm
from diffllm.metrics.table import METRICS

ROOT = Path(diffllm.__file__).parents[1]
MOST_LINES = 110
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "launch/*.md", "data/*.md", "diffllm/**/README.md")
    for page in ROOT.glob(pattern)
)


def test_readme_has_at_most_110_lines():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_markdown_links_point_to_existing_pages_and_anchors(page: Path):
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    missing = []
    for link in links:
        path, _, anchor = link.partition("#")
        if path.startswith(("http:", "https:", "../../actions/")):  # a page of the repository host
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert missing == []


def anchors(page: Path) -> list[str]:
    """Return the anchors that GitHub generates for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_documented_guarantee_refers_to_existing_test_files():
    """The second test of a guarantee may be in the directory of the first test."""
    text = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(rows) > 40
    for row in rows:
        named = re.findall(r"`((?:tests/)?[\w/]*(?:test_\w+\.py|plan/|report/|study/))`", row)
        assert named, row
        first = (ROOT / named[0]).parent
        for name in named:
            assert (ROOT / name).exists() or (first / name).exists(), name


def test_generated_documentation_pages_are_up_to_date():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    configuration, metrics = generate.configuration(), generate.metrics()
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == configuration, (
        "run `make docs`"
    )
    assert "### model.attention of gated, gated_headwise" in configuration
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics, "run `make docs`"
    assert all(f"| `{metric.name}` |" in metrics for metric in METRICS)


def test_table_of_environment_variables_lists_exactly_the_variables_in_the_code():
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    documented = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    assert documented == variables_in_code()


def variables_in_code() -> set[str]:
    """Return the names in the style of environment variables, and all keys of an environment."""
    found = set()
    for file in (ROOT / "diffllm").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        found |= set(re.findall(r"\$\{oc\.env:(\w+)", text))
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Constant(str(name)) if re.fullmatch(r"[A-Z]+(_[A-Z0-9]+)+", name):
                    found.add(name)
                case (
                    ast.Subscript(place, ast.Constant(str(name)))
                    | ast.Call(ast.Attribute(place), [ast.Constant(str(name)), *_])
                    | ast.Compare(ast.Constant(str(name)), [ast.In() | ast.NotIn()], [place])
                ) if ast.unparse(place) in ("env", "os.environ"):
                    found.add(name)
    return {name for name in found if not name.startswith("SC_")}  # names of os.sysconf
