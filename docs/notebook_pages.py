"""Sphinx extension: pages from Jupyter notebooks with committed outputs."""

import json
from typing import Any

from myst_parser.sphinx_ import Parser


def markdown_of(notebook: str) -> str:
    """Convert a notebook to Markdown: text, code, printed text and PNG figures, in order."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"```python\n{source}\n```")
            parts += output_parts(cell["outputs"])
    return "\n\n".join(parts) + "\n"


def output_parts(outputs: list[dict[str, Any]]) -> list[str]:
    """Return a code block with all text of a cell, then its figures."""
    texts, figures = [], []
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            png = "".join(data["image/png"]).replace("\n", "")
            figures.append(f"![output of the code above](data:image/png;base64,{png})")
        else:
            texts += output.get("text") or data["text/plain"]
    if texts:
        text = "".join(texts).strip("\n")
        return [f"```\n{text}\n```", *figures]
    return figures


class NotebookParser(Parser):
    """Parser of .ipynb files."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        super().parse(markdown_of(inputstring), document)


def setup(app: Any) -> None:
    app.setup_extension("myst_parser")
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
