"""One table in four formats: the same cells as text, Markdown, HTML and CSV."""

import csv
import io
from html.parser import HTMLParser

from diffllm.core.printing import Cell, Column, Table

LABELS = Column("Row", [Cell("stan_dard"), Cell("<b>|", icon="<i></i>")], left=True)
LOSSES = Column(
    "Loss",
    [Cell("4.1", 4.125, ("4.0 to 4.2", "5 bits")), Cell("–", tag="1 of 3 diverged")],
    unit="nats",
    meaning="held-out loss",
)
WORDS = Column("State", [Cell("finished"), Cell("", shade=0.5)], left=True)
TABLE = Table([LABELS, LOSSES, WORDS])


def test_text_aligns_numbers_right_and_words_left():
    assert TABLE.text() == [
        f"Row        {'Loss, nats':>25}  State",
        "stan_dard  4.1 (4.0 to 4.2) (5 bits)  finished",
        f"<b>|       {'–, 1 of 3 diverged':>25}",
    ]


def test_text_wider_than_its_limit_puts_first_cells_on_lines_of_their_own():
    table = Table.of(["", "a"], [["label", "1"], ["other", "22"]])
    assert table.text(9) == ["        a", "label   1", "other  22"]
    assert table.text(8) == ["     a", "label", "     1", "other", "    22"]


def test_markdown_has_a_rule_and_escapes_bars():
    assert TABLE.markdown().splitlines() == [
        "| Row | Loss, nats | State |",
        "|---|---|---|",
        "| stan_dard | 4.1 (4.0 to 4.2) (5 bits) | finished |",
        "| <b>\\| | –, 1 of 3 diverged |  |",
    ]


def test_csv_has_values_in_full_and_texts_where_there_is_none():
    assert list(csv.reader(io.StringIO(TABLE.csv()))) == [
        ["Row", "Loss", "State"],
        ["stan_dard", "4.125", "finished"],
        ["<b>|", "–", ""],
    ]
    values = Table.of(["a", "b", "c"], [[Cell(value=[1, "x"]), Cell(value=True), Cell()]])
    assert values.csv() == 'a,b,c\n"[1, ""x""]",true,\n'


def test_html_escapes_texts_and_keeps_icons():
    class Reader(HTMLParser):
        tags: tuple[str, ...] = ()
        text = ""

        def handle_starttag(self, tag, attrs):
            self.tags += (tag,)

        def handle_data(self, data):
            self.text += data

    html = TABLE.html("Losses & more", "cards", key="main")
    read = Reader()
    read.feed(html)
    assert 'aria-label="Losses &amp; more"' in html
    assert '<table class="cards" id="main">' in html
    assert '<td data-title="Loss, nats"><span>4.1</span><small>4.0 to 4.2</small>' in html
    assert "color-mix(in srgb, var(--accent) 30%, transparent)" in html
    assert "stan_<wbr>dard" in html
    assert "b" not in read.tags
    assert read.tags.count("i") == 1
    assert all(text in read.text for text in ("<b>|", "1 of 3 diverged", "finished"))
    assert "held-out loss" not in html


def test_a_table_without_rows_has_its_heads():
    empty = Table.of(["a", ("b", "nats")], [])
    assert empty.text() == ["a  b, nats"]
    assert empty.csv() == "a,b\n"
