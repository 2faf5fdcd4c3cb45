"""Sphinx settings of the documentation site: `make docs-site`."""

project = "diffllm"
author = "the diffllm developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
myst_fence_as_directive = ["mermaid"]
root_doc = "docs/index"
include_patterns = [
    "*.md", "docs/*.md", "data/*.md", "launch/*.md", "benchmarks/*.md",
    "benchmarks/**/*.md", "diffllm/*.md", "diffllm/**/*.md",
]  # fmt: skip
html_theme = "furo"
html_title = "diffllm"
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "none"
