"""Tokens as short labels that a figure's font can draw."""

import re
import unicodedata
from functools import cache

from matplotlib import font_manager
from matplotlib.font_manager import FontProperties, findfont, get_font

LONGEST = 12
MARKS = {" ": "·", "\u2581": "·", "\n": "↵", "\t": "⇥"}
FAMILIES = (
    *("DejaVu Sans Mono", "DejaVu Sans"),  # these two come with matplotlib
    *("Noto Sans Mono CJK SC", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei"),
)


@cache
def families() -> list[str]:
    """The font families that are installed, in the order in which glyphs are looked for."""
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return [family for family in FAMILIES if family in installed]


@cache
def glyphs() -> frozenset[int]:
    """Code points that one of the families has."""
    paths = (findfont(FontProperties(family=family)) for family in families())
    return frozenset(code for path in paths for code in get_font(path).get_charmap())


def visible(piece: str) -> str:
    """A piece of the vocabulary in one line, at most LONGEST characters.

    White space gets marks. A byte that is no ASCII character is written as in \\xf0, a character
    that no font has, or that shows nothing on its own, by its code point.
    """
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    if byte:
        code = int(byte[1], 16)
        text = character(chr(code)) if code < 128 else f"\\x{code:02x}"
    else:
        text = "".join(map(character, piece))
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def character(c: str) -> str:
    """One character, its mark or its escape."""
    if c in MARKS:
        return MARKS[c]
    alone = c.isprintable() and not unicodedata.category(c).startswith("M")
    if alone and ord(c) in glyphs():
        return c
    return f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}"
