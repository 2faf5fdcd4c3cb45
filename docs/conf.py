"""Sphinx settings of the documentation site: `make docs-site`."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # notebook_pages.py

package = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
project = "diffllm"
author = "the diffllm developers"
release = package["version"]
copyright = f"{author}. {project} {release}, license {package['license']}."  # Furo's footer
extensions = [
    "myst_parser",
    "notebook_pages",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib.mermaid",
]
myst_fence_as_directive = ["mermaid"]
# The default output loads mermaid.js from a CDN when a page is opened.
mermaid_output_format = "svg"
mermaid_cmd = shlex.join([sys.executable, "-m", "mermaidx"])
mermaid_params = ["--quiet", "-b", "white"]
root_doc = "docs/index"
include_patterns = [
    "*.md", "docs/*.md", "docs/*.ipynb", "data/*.md", "launch/*.md", "benchmarks/*.md",
    "benchmarks/**/*.md", "diffllm/*.md", "diffllm/**/*.md",
]  # fmt: skip
highlight_language = "text"  # of blocks without a language, such as output
html_theme = "furo"
html_title = "diffllm"
html_static_path = ["static"]
html_css_files = ["site.css"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "none"


def remove_badges(app, docname, source):
    """Remove the badges of the README, which are images of another host."""
    source[0] = re.sub(r"^\[!\[.*\]\(https?:.*\n", "", source[0], flags=re.MULTILINE)


def setup(app):
    app.connect("source-read", remove_badges)
