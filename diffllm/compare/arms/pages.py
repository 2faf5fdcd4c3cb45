"""Model of a page, which renders as HTML, as Markdown and as text for a terminal.

Texts are plain text, in which `code` between single backticks is a code span. Everything else is
escaped, because texts come from study files and run directories: no text becomes markup.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from diffllm.core.errors import printable
from diffllm.core.printing import CODE, KEPT, Table, markdown_text

Inline = Callable[[str], str]
"""A function that escapes one text."""


class Block:
    """A part of a page. Blocks without Markdown are shown only in HTML."""

    def markdown(self, inline: Inline) -> str:
        return ""


@dataclass(frozen=True)
class Paragraph(Block):
    text: str
    label: str = ""
    """Words in bold before the text."""
    style: str = ""
    """CSS class."""

    def markdown(self, inline: Inline) -> str:
        label = f"**{inline(self.label)}**: " if self.label else ""
        return f"{label}{inline(self.text)}"


@dataclass(frozen=True)
class Item:
    """A list item with an icon."""

    text: str
    icon: Markup
    small: str = ""
    """Line in small print below the text."""
    heading: str = ""
    """Line above the item."""


@dataclass(frozen=True)
class Items(Block):
    items: Sequence[str | Item]
    style: str = ""

    def markdown(self, inline: Inline) -> str:
        texts = [item if isinstance(item, str) else item.text for item in self.items]
        return "\n".join(f"- {inline(text)}" for text in texts)


@dataclass(frozen=True)
class TableBlock(Block):
    """A table of a page."""

    table: Table
    label: str
    """Accessible name of the table."""
    style: str = "cards"
    key: str = ""
    """id of the HTML element."""

    def markdown(self, inline: Inline) -> str:
        return self.table.markdown(inline)


@dataclass(frozen=True)
class Figure:
    """A picture with a caption, or a text in a fixed-width font."""

    title: str
    caption: str = ""
    image: Markup | None = None
    folded: bool = False
    text: str = ""


@dataclass(frozen=True)
class FigureGrid(Block):
    figures: Sequence[Figure]


@dataclass(frozen=True)
class Glossary(Block):
    """Pairs of a term and its explanation."""

    terms: Sequence[tuple[str, str]]
    style: str = "terms"


@dataclass(frozen=True)
class Notice(Block):
    """A warning in a box."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Details(Block):
    """Blocks that the reader can fold."""

    title: str
    blocks: Sequence[Block]
    level: int = 3
    """Level of the title as a heading; 0: no heading."""
    is_open: bool = False
    style: str = ""


@dataclass(frozen=True)
class Section:
    """Blocks below a heading. Markdown pages are short and have no headings of sections."""

    title: str
    blocks: Sequence[Block]
    key: str = ""
    """id of the heading in HTML."""


@dataclass(frozen=True)
class Page:
    title: str
    header: Sequence[Block]
    sections: Sequence[Section]
    footer: Section
    result: str = ""
    """Result in one or two words; a badge below the title in HTML."""

    @property
    def full_title(self) -> str:
        """Title and result on one line."""
        title = " ".join(self.title.split())
        return f"{title}: {self.result}" if self.result else title

    def html(self) -> str:
        """Return the page as one HTML file, which loads nothing."""
        return printable(template().render(page=self, blocks_of=shown_in_html), KEPT)

    def markdown(self) -> str:
        return self.joined(markdown_text)

    def text(self) -> str:
        """Return the text of `markdown` for a terminal: nothing is escaped but control codes."""
        return self.joined(str)

    def joined(self, inline: Inline) -> str:
        blocks = list(self.header)
        for section in (*self.sections, self.footer):
            blocks += section.blocks
        parts = [f"# {inline(self.full_title)}"]
        for block in blocks:
            text = block.markdown(inline)
            if text:
                parts.append(text)
        return printable("\n\n".join(parts) + "\n", KEPT)


def shown_in_html(blocks: Iterable[Block]) -> list[tuple[str, Block]]:
    """Return pairs of a block and the name of its class, by which the template chooses its HTML."""
    return [(type(block).__name__, block) for block in blocks]


def html_text(text: str) -> Markup:
    """Escape a text, and mark its code spans."""
    html = Markup()
    for i, part in enumerate(CODE.split(text)):
        # CODE has one group, so that every second part is the content of a code span.
        html += Markup("<code>{}</code>").format(part) if i % 2 else escape(part)
    return html


def template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("diffllm.compare.arms", "."), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters["inline"] = html_text
    return environment.get_template("page.html.jinja")
