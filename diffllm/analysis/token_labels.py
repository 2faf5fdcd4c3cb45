"""Tokens as short labels in the monospaced font that comes with matplotlib."""

import re
import unicodedata
from functools import cache

from matplotlib.font_manager import findfont, get_font

FONT = "DejaVu Sans Mono"
LONGEST = 12
MARKS = {" ": "·", "\u2581": "·", "\n": "↵", "\t": "⇥"}


@cache
def glyphs() -> frozenset[int]:
    """Code points that FONT can draw."""
    return frozenset(get_font(findfont(FONT)).get_charmap())


def visible(piece: str) -> str:
    """A piece of the vocabulary in one line, at most LONGEST characters.

    White space gets marks. A byte that is no ASCII character, a character that FONT lacks and one
    that shows nothing on its own are escaped, as in \\xf0 or \\u4e2d.
    """
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    code = int(byte[1], 16) if byte else 0
    text = f"\\x{code:02x}" if code > 127 else "".join(map(character, chr(code) if byte else piece))
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def character(c: str) -> str:
    """One character, its mark or its escape."""
    alone = c.isprintable() and not unicodedata.category(c).startswith("M")
    if c in MARKS or (alone and ord(c) in glyphs()):
        return MARKS.get(c, c)
    return c.encode("unicode_escape").decode()
