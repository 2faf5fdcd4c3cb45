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
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            parts.append(markdown_of_output(output))
    return "\n\n".join(parts) + "\n"


def markdown_of_output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```\n{''.join(output['text'])}```"
    png = "".join(output["data"]["image/png"]).replace("\n", "")
    return f"![figure](data:image/png;base64,{png})"


class NotebookParser(Parser):
    """Parser of .ipynb files."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        super().parse(markdown_of(inputstring), document)


def setup(app: Any) -> None:
    app.setup_extension("myst_parser")
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
