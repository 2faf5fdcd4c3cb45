"""Text of foreign files does not reach a terminal as control characters."""

import io
import json
import re
from unicodedata import category

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffllm.core.console import Console
from diffllm.core.printing import echo, echo_json, to_stderr
from diffllm.metrics.display import Display

OWN = re.compile(r"\x1b\[[\d;]*m")
"""Colours, which rich writes itself."""
HOSTILE = "\x1b]0;title\x07 \x1b[31mred \x9b31m \u202eleft \rhidden \ud800 [/link] :x: \x7f"
ESCAPED = r"\x1b]0;title\x07 \x1b[31mred \x9b31m \u202eleft \rhidden \ud800 [/link] :x: \x7f"


def acted_on(text: str) -> set[str]:
    """Characters that a terminal acts on."""
    shown = {c for c in text if c.isprintable() or category(c) == "Zs" or c >= "\U000e0020"}
    return set(text) - shown - set("\n\t\u00ad\u200b\u200c\u200d\u2060")


@given(st.text())
def test_echo_escapes_every_control_character(text: str):
    file = io.StringIO()
    echo(text, file=file)
    assert not acted_on(file.getvalue())


def test_echo_keeps_lines_tabs_and_joined_letters(capsys):
    echo("a\tb\n中\u3000文 \u200c\u200d é\u00a0!")
    echo(HOSTILE, end="")
    assert capsys.readouterr().out == f"a\tb\n中\u3000文 \u200c\u200d é\u00a0!\n{ESCAPED}"


def test_to_stderr_prints_one_escaped_line(capsys):
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
def test_console_escapes_foreign_text(show):
    screen = io.StringIO()
    show(screen)
    assert not acted_on(OWN.sub("", screen.getvalue()))
    assert ESCAPED in screen.getvalue()
