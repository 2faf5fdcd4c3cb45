"""Texts, figures and tables of reports, as tests read them."""

import base64
import csv
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser

import pytest

from diffllm.compare.report import figures
from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.report_page import page
from diffllm.compare.report.tables import csv_text, table_columns
from diffllm.core.printing import TableColumn

VOID = {"meta", "link", "input", "br", "wbr", "img", "hr"}
LOADING = ("src", "href", "data", "action", "poster", "srcset")


class Reader(HTMLParser):
    """Parser that checks the balance of tags, and collects ids, links, handlers and text."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in LOADING]
        self.handlers += [name for name in names if name.startswith("on")]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data


@contextmanager
def without_drawing(*drawn: str) -> Iterator[None]:
    """Replace the figures of pages by empty images, except figures with the titles `drawn`.

    Titles and captions do not change. Drawing takes most of the time that a page needs.
    """
    draw = figures.to_svg
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            figures,
            "to_svg",
            lambda figure, title: draw(figure, title) if title in drawn else b"<svg/>",
        )
        yield


def undrawn_page(comparison: Comparison, *drawn: str) -> str:
    """Return the HTML of a report page, which shows only figures with the titles `drawn`."""
    with without_drawing(*drawn):
        return page(comparison)


def page_text(comparison: Comparison) -> str:
    """Return the visible text of a report page; words are separated by single spaces."""
    return " ".join(Reader(undrawn_page(comparison)).text.split())


def csv_rows(comparison: Comparison) -> list[dict[str, str]]:
    """Return the rows of report.csv."""
    return list(csv.DictReader(io.StringIO(csv_text(comparison.rows))))


def columns_of(comparison: Comparison) -> dict[str, TableColumn]:
    """Return the columns of the table of results by title."""
    columns = table_columns(comparison.rows, comparison.baseline)
    return {column.title: column for column in columns}


def figures_of(html: str) -> dict[str, str]:
    """Return the SVG files of a page by title."""
    images = re.findall(r'<h3>([^<]*)</h3>\s*<div><img [^>]*;base64,([^"]*)">', html)
    return {title: base64.b64decode(data).decode() for title, data in images}


def words_of(svg: str) -> list[str]:
    """Return the texts of an SVG file in order; the file must be well-formed."""
    texts = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return [(text.text or "").strip() for text in texts]
