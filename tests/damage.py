"""Damaged files drawn by Hypothesis, and the check for readers of untrusted files."""

import json
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from diffllm.core.errors import UserError

RAN: list[bool] = []
"""Contains an item if code of a damaged file has run."""


class Runs:
    """Appends to RAN when unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("import damage; damage.RAN.append(True)",)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
"""YAML of a few hundred bytes whose aliases expand to 10^11 values."""
DOCUMENTS = (
    b"", b"\n", b"\0" * 64, b"\xff\xfe{}", b"[" * 100_000, b'{"a": ' * 100_000, b"9" * 5000, b"[]",
    b"{}", b"null", b"NaN", b"1e999", b'"text"', b'{"a": "\\ud800"}', b"{]", b"a: {b", b"PAR1PAR1",
    BOMB.encode(), b"a: !!python/object/apply:damage.RAN.append [1]\n", pickle.dumps(Runs()),
)  # fmt: skip
"""Complete files of other formats or other content."""
VALUES = (
    None, True, -1, 0, 1.5, 10**30, 2**63, 1e308, math.nan, math.inf, "", "text", "../../etc", [],
    "\ud800", "a\0b", "\x1b[31mred\n", "x" * 5000, {}, [1, [2, [3]]], {"a": {"b": None}}, [None],
    {"": 0}, {"../x": []}, "~nosuchuser", "step-00000099", "${oc.env:HOME}", "???",
)  # fmt: skip
"""Values of types, sizes and meanings that fields do not expect."""


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draw a file that is truncated, or has changed, added or missing bytes."""
    kind = draw(st.sampled_from(["cut", "flip", "flip", "insert", "remove", "append"]))
    content, place = bytearray(whole), draw(st.integers(0, len(whole) - 1))
    if kind == "flip":
        for at in draw(st.sets(st.integers(0, len(whole) - 1), min_size=1, max_size=5)):
            content[at] ^= 1 << draw(st.integers(0, 7))
        return bytes(content)
    ends = {"cut": len(whole), "remove": place + draw(st.integers(1, 8)), "insert": place}
    added = draw(st.binary(min_size=1, max_size=8)) if kind in ("insert", "append") else b""
    content[place if kind in ends else len(whole) : ends.get(kind)] = added
    return bytes(content)


@st.composite
def edited(draw: st.DrawFn, whole: Any) -> bytes:
    """Draw a JSON file, also valid YAML, with one value changed, removed or added anywhere."""
    content = place = json.loads(json.dumps(whole))
    while True:
        key = draw(st.sampled_from([*place] if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or draw(st.booleans()):
            break
        place = place[key]
    value, kind = (
        draw(st.sampled_from(VALUES)),
        draw(st.sampled_from(["set", "set", "drop", "add"])),
    )
    if kind == "drop":
        del place[key]
    elif kind == "add" and isinstance(place, list):
        place.append(value)
    else:
        names = st.sampled_from(["new", "\ud800", "", "../x", "a\0b"])
        place[draw(names) if kind == "add" else key] = value
    return json.dumps(content).encode()


def try_all(
    check: Callable[[bytes], Any],
    kinds: st.SearchStrategy[bytes],
    examples: int,
    others: Sequence[bytes] = (),
) -> None:
    """Call `check` with DOCUMENTS, `others` and drawn contents. Mark tests that use this `fuzz`."""

    @settings(max_examples=examples)
    @given(kinds)
    def drawn(content: bytes) -> None:
        check(content)

    for content in (*DOCUMENTS, *others):
        check(content)
    drawn()


def outcome(read: Callable[[], Any], file: Path, content: bytes, named: Path | None = None) -> Any:
    """Return the result or the UserError of `read` for a file with this content.

    Assert that the error names `named` (default: the file) in one line, and that `read` writes no
    file and runs no code. Restore the file afterwards.
    """
    whole = file.read_bytes() if file.exists() else None
    file.write_bytes(content)
    try:
        before = contents(file.parent)
        try:
            found = read()
        except UserError as error:
            found = error
        assert contents(file.parent) == before
    finally:
        file.write_bytes(whole) if whole is not None else file.unlink()
    if isinstance(found, UserError):
        assert str(named or file) in str(found)
        assert str(found).isprintable()
    assert not RAN
    return found


def contents(directory: Path) -> dict[str, bytes | None]:
    """Map paths below a directory to contents, None for directories; skip locks and checksums."""
    files = [path for path in directory.rglob("*") if path.suffix not in (".verified", ".lock")]
    return {str(path): path.read_bytes() if path.is_file() else None for path in files}
