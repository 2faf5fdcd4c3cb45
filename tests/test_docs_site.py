"""The documentation site (`make docs-site`) and the notebook that is one of its pages."""

import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from runs.command import command, success_of
from runs.json_files import read_json

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "differential_attention.ipynb"
GROUPS = ["Start", "Compare", "Scale", "Extend", "Evaluate", "Reference"]
LOADING_LINKS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload"}
REMOTE = re.compile(r"^\s*(https?:)?//", re.IGNORECASE)


class Resources(HTMLParser):
    """Collect the addresses that a browser loads when it opens a page."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag == "link" and not LOADING_LINKS & set(values.get("rel", "").split()):
            return
        names = ("href",) if tag == "link" else ("src", "srcset", "poster", "data")
        self.addresses += [values[name] for name in names if values.get(name)]


def remote_resources(site):
    """Return (file, address) of each resource of another host in pages, styles and scripts."""
    remote = []
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        parser = Resources()
        parser.feed(text)
        imports = re.findall(r"""\bimport\b[^;\n]*?["'](https?://[^"']+)""", text)
        addresses = [*parser.addresses, *style_addresses(text), *imports]
        remote += [(page.name, address) for address in addresses if REMOTE.match(address)]
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        addresses = style_addresses(path.read_text(encoding="utf-8"))
        remote += [(path.name, address) for address in addresses if REMOTE.match(address)]
    return remote


def style_addresses(text):
    return re.findall(r"""(?:url\(|@import\s+(?!url))\s*["']?([^"')\s]+)""", text)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", out]
    success_of(command(words, ROOT, os.environ))
    return out


@pytest.mark.slow
def test_built_site_loads_no_resource_from_another_host(site):
    assert remote_resources(site) == []
    assert "<object data=" in (site / "docs" / "architecture.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page",
    [
        '<img src="https://img.example/badge.svg">',
        '<link rel="stylesheet" href="//cdn.example/site.css">',
        '<script type="module">import mermaid from "https://cdn.example/mermaid.mjs";</script>',
        "<style>@import url(https://fonts.example/a.css);</style>",
    ],
)
def test_remote_resource_of_page_is_detected(tmp_path, page):
    link = '<a href="https://example.org">link</a>'
    (tmp_path / "page.html").write_text(f"{link}{page}", encoding="utf-8")
    assert len(remote_resources(tmp_path)) == 1


@pytest.mark.slow
def test_navigation_of_site_lists_every_page_in_exactly_one_group(site):
    text = (site / "docs" / "index.html").read_text(encoding="utf-8")
    sidebar = text.partition('<div class="sidebar-tree">')[2].partition("</aside>")[0]
    assert re.findall(r'class="caption-text">([^<]+)', sidebar) == GROUPS
    links = re.findall(r'class="reference internal" href="([^"#]+)', sidebar)
    listed = sorted((site / "docs" / link).resolve() for link in links)
    generated = {site / "genindex.html", site / "py-modindex.html", site / "search.html"}
    pages = set(site.rglob("*.html")) - generated - {site / "docs" / "index.html"}
    assert listed == sorted(pages)
    for verdict in (ROOT / "benchmarks" / "results").glob("*/verdict.json"):
        claim = read_json(verdict)["claim"]
        assert f">{claim.replace(chr(39), '’')}: " in sidebar


@pytest.mark.slow
def test_notebook_prints_its_committed_output_when_run_again(tmp_path):
    """Cells tagged "trained" depend on a trained model, whose losses differ between machines."""
    cells = [cell for cell in read_json(NOTEBOOK)["cells"] if "outputs" in cell]
    separator = "=== next cell ==="
    script = f"\nprint({separator!r})\n".join("".join(cell["source"]) for cell in cells)
    (tmp_path / "notebook.py").write_text(script, encoding="utf-8")
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    done = success_of(command([sys.executable, "notebook.py"], tmp_path, environment))
    printed = re.split(rf"^{separator}\n", done.out, flags=re.MULTILINE)
    assert len(printed) == len(cells)
    compared = 0
    for cell, text in zip(cells, printed, strict=True):
        texts = [output for output in cell["outputs"] if output["output_type"] == "stream"]
        if texts and "trained" not in cell["metadata"].get("tags", []):
            assert text.strip() == "".join(texts[0]["text"]).strip()
            compared += 1
    assert compared >= 4
