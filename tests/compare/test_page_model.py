"""The page model: HTML, Markdown and text have the same content, and no text becomes markup."""

import re
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt
from markupsafe import Markup

from diffllm.compare.arms.pages import (
    Details,
    Figure,
    FigureGrid,
    Glossary,
    Item,
    Items,
    Notice,
    Page,
    Paragraph,
    Section,
    TableBlock,
)
from diffllm.core.printing import Cell, Table, markdown_text

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</style></title><b>bold</b>",
    "[link](https://host.invalid)",
    "![image](https://host.invalid/x.png)",
    "# heading",
    "1. list",
    "- list",
    "> quote",
    "line\n\n# heading after empty line",
    "*bold* **bold** _italic_ __bold__ ~~struck~~",
    "&lt;b&gt; &#60;b>",
    "unpaired ` backtick <b>",
    "`` ` <b> ``` code spans of other lengths",
    "| pipe | <b>",
    "backslash \\<b> \\`<b>`",
    "`code` \\",
    "\x1b[31m escape sequence",
]
PLAIN = [
    "v2 minus half is -0.02811 nats per token (95% bounds -0.0376 and +0.0024)",
    "Arm diff_v2_lambda_fixed: `attention=diff_v2 model.match_flops_to=x|y` in 3.5M",
]


ICON = Markup("<i></i>")


def page_of(text: str) -> Page:
    table = Table.of(["arm", "value"], [[text, Cell(text, small=(text,), tag=text)]])
    return Page(
        title=text,
        header=[Paragraph(text, label="Source"), Items([text, Item(text, ICON, text)])],
        sections=[
            Section(
                text,
                [
                    TableBlock(table, text),
                    FigureGrid([Figure(text, text, ICON), Figure(text, text=text)]),
                    Details(text, [Glossary([(text, text)]), Notice(text, [Paragraph(text)])]),
                ],
            )
        ],
        footer=Section("", [Paragraph(text)]),
        result="shown",
    )


class Tags(HTMLParser):
    """Names of all elements of a page, and its text."""

    def __init__(self, html: str):
        super().__init__()
        self.names: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in ("wbr", "code"):
            self.names.append(tag)

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_adds_no_element_to_html_page(text):
    html = page_of(text).html()
    assert Tags(html).names == Tags(page_of("word").html()).names
    assert "\x1b" not in html


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_plain_text_in_markdown(text):
    """The parser of CommonMark is the judge: it returns the text without added elements."""
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    markdown = page_of(text).markdown()
    names = Tags(parser.render(markdown)).names
    assert names == Tags(parser.render(page_of("word").markdown())).names
    assert "\x1b" not in markdown


@pytest.mark.parametrize("text", PLAIN)
def test_ordinary_text_is_equal_in_html_and_markdown_and_terminal(text):
    page = page_of(text)
    assert markdown_text(text) == text
    assert page.text() == page.markdown()
    assert f"**Source**: {text}\n" in page.text()
    assert text.replace("`", "") in Tags(page.html()).text
    for code in re.findall("`(.*?)`", text):
        assert f"<code>{code}</code>" in page.html()
