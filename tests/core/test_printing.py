"""Printing without control characters of untrusted files, status lines and tables."""

import csv
import io
import json
import re
from unicodedata import category

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffllm.core import console
from diffllm.core.console import Console
from diffllm.core.printing import Cell, Table, TableColumn, echo, echo_json, to_stderr
from diffllm.metrics.display import Display

OWN = re.compile(r"\x1b\[[\d;]*m")
"""Colour codes that rich writes."""
HOSTILE = "\x1b]0;title\x07 \x1b[31mred \x9b31m \u202eleft \rhidden \ud800 [/link] :x: \x7f"
ESCAPED = r"\x1b]0;title\x07 \x1b[31mred \x9b31m \u202eleft \rhidden \ud800 [/link] :x: \x7f"


def acted_on(text: str) -> set[str]:
    """Return the characters of a text that a terminal interprets."""
    shown = {c for c in text if c.isprintable() or category(c) == "Zs" or c >= "\U000e0020"}
    return set(text) - shown - set("\n\t\u00ad\u200b\u200c\u200d\u2060")


@given(st.text())
def test_echo_escapes_every_control_character(text):
    file = io.StringIO()
    echo(text, file=file)
    assert not acted_on(file.getvalue())


def test_echo_does_not_change_line_breaks_tabs_or_zero_width_joiners(capsys):
    echo("a\tb\n中\u3000文 \u200c\u200d é\u00a0!")
    echo(HOSTILE, end="")
    assert capsys.readouterr().out == f"a\tb\n中\u3000文 \u200c\u200d é\u00a0!\n{ESCAPED}"


def test_to_stderr_prints_single_line_with_escaped_control_characters(capsys):
    to_stderr("warning: one\n two \x1b[0m")
    assert capsys.readouterr().err == "warning: one two \\x1b[0m\n"


def test_echo_json_prints_json_without_control_characters(capsys):
    echo_json({HOSTILE[:-1]: [HOSTILE[:-1]]})
    out = capsys.readouterr().out
    assert json.loads(out) == {HOSTILE[:-1]: [HOSTILE[:-1]]}
    assert not acted_on(out)


def rich_line(screen: io.StringIO) -> None:
    Console(file=screen, force_terminal=True, width=200).print(HOSTILE)


def line_above_bar(screen: io.StringIO) -> None:
    display = Display(2)
    display.console = Console(file=screen, force_terminal=True, width=200)
    display.print(HOSTILE)


@pytest.mark.parametrize("show", [rich_line, line_above_bar])
def test_rich_console_escapes_control_characters_of_untrusted_text(show):
    screen = io.StringIO()
    show(screen)
    assert not acted_on(OWN.sub("", screen.getvalue()))
    assert ESCAPED in screen.getvalue()


def test_stage_names_are_written_to_stderr_if_console_is_not_a_terminal(monkeypatch, capsys):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(console, "Console", lambda **_: terminal)
    with console.stages() as say:
        say("first [a]")
        say("second")
    assert "second" in screen.getvalue()
    assert capsys.readouterr().err == ""
    monkeypatch.undo()
    with console.stages() as say:
        say("first [a]")
        say("second")
    assert capsys.readouterr().err == "first [a]\nsecond\n"


LABELS = TableColumn("Row", [Cell("stan_dard"), Cell("<b>|", icon="<i></i>")], left=True)
LOSSES = TableColumn(
    "Loss",
    [Cell("4.1", 4.125, ("4.0 to 4.2", "5 bits")), Cell("–", tag="1 of 3 diverged")],
    unit="nats",
    meaning="held-out loss",
)
WORDS = TableColumn("State", [Cell("finished"), Cell("")], left=True)
TABLE = Table([LABELS, LOSSES, WORDS])


def test_text_table_right_aligns_columns_of_numbers():
    assert TABLE.text() == [
        f"Row        {'Loss, nats':>25}  State",
        "stan_dard  4.1 (4.0 to 4.2) (5 bits)  finished",
        f"<b>|       {'–, 1 of 3 diverged':>25}",
    ]


def test_text_table_has_row_labels_on_separate_lines_if_width_is_small():
    table = Table.of(["", "a"], [["label", "1"], ["other", "22"]])
    assert table.text(9) == ["        a", "label   1", "other  22"]
    assert table.text(8) == ["     a", "label", "     1", "other", "    22"]


def test_table_markdown_has_header_separator_and_escaped_markup():
    assert TABLE.markdown().splitlines() == [
        "| Row | Loss, nats | State |",
        "|---|---|---|",
        "| stan_dard | 4.1 (4.0 to 4.2) (5 bits) | finished |",
        "| \\<b>\\| | –, 1 of 3 diverged |  |",
    ]


def test_table_csv_contains_unrounded_values():
    assert list(csv.reader(io.StringIO(TABLE.csv()))) == [
        ["Row", "Loss", "State"],
        ["stan_dard", "4.125", "finished"],
        ["<b>|", "–", ""],
    ]
    values = Table.of(["a", "b", "c"], [[Cell(value=[1, "x"]), Cell(value=True), Cell()]])
    assert values.csv() == 'a,b,c\n"[1, ""x""]",true,\n'


def test_table_html_escapes_text_but_not_icons():
    html = TABLE.html("Losses & more", "cards", key="main")
    assert 'aria-label="Losses &amp; more"' in html
    assert '<table class="cards" id="main">' in html
    assert '<td data-title="Loss, nats"><span>4.1</span><small>4.0 to 4.2</small>' in html
    assert "stan_<wbr>dard" in html
    assert "<b>" not in html
    assert html.count("<i>") == 1
    assert all(text in html for text in ("&lt;b&gt;|", "1 of 3 diverged", "finished"))
    assert "held-out loss" not in html
