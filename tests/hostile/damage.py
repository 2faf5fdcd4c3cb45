"""Damages of files: contents drawn by Hypothesis, exact edits, and special files."""

import json
import math
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from diffllm.config.yaml_file import parse_yaml

RAN: list[bool] = []
"""Contains an item if code of a damaged file has run."""


class Runs:
    """Appends to RAN when unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("from hostile import damage; damage.RAN.append(True)",)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
"""YAML of a few hundred bytes whose aliases expand to 10^11 values."""
DOCUMENTS = (
    b"", b"\n", b"\0" * 64, b"\xff\xfe{}", b"[" * 100_000, b'{"a": ' * 100_000, b"9" * 5000, b"[]",
    b"{}", b"null", b"NaN", b"1e999", b'"text"', b'{"a": "\\ud800"}', b"{]", b"a: {b", b"PAR1PAR1",
    BOMB.encode(), b"a: !!python/object/apply:hostile.damage.RAN.append [1]\n",
    pickle.dumps(Runs()),
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


def structured(file: Path) -> st.SearchStrategy[bytes] | None:
    """Draw edits of the content of a JSON or YAML file, or of the first line of a JSONL file."""
    whole = file.read_bytes()
    if file.suffix == ".json":
        return edited(json.loads(whole))
    if file.suffix == ".yaml":
        return edited(parse_yaml(whole.decode()))
    if file.suffix == ".jsonl":
        first, *lines = whole.splitlines(keepends=True)
        return edited(json.loads(first)).map(lambda new: b"".join([new + b"\n", *lines]))
    return None


Damage = Callable[[Path], Any]
"""Damages the file at a path."""


def content(new: str | bytes) -> Damage:
    new = new.encode() if isinstance(new, str) else new
    return lambda file: file.write_bytes(new)


def edit(change: Callable[[Any], object]) -> Damage:
    """Return a change of the content of a JSON file, or of the last line of a JSONL file."""

    def edit_file(file: Path) -> None:
        text = file.read_text(encoding="utf-8")
        before, last = "", text
        if file.suffix == ".jsonl":
            *lines, last = text.splitlines(keepends=True)
            before = "".join(lines)
        whole = json.loads(last)
        change(whole)
        file.write_text(f"{before}{json.dumps(whole)}\n", encoding="utf-8")

    return edit_file


MISSING = object()


def put(*keys: str | int, value: Any) -> Damage:
    """Return an `edit` of one value; MISSING removes the value."""

    def change(whole: Any) -> None:
        for key in keys[:-1]:
            whole = whole[key]
        whole[keys[-1]] = value
        if value is MISSING:
            del whole[keys[-1]]

    return edit(change)


def lines(change: Callable[[list[str]], list[str]]) -> Damage:
    """Return a change of the lines of a text file; all lines contain their line break."""

    def changed(file: Path) -> None:
        texts = file.read_text(encoding="utf-8").splitlines(keepends=True)
        file.write_text("".join(change(texts)), encoding="utf-8")

    return changed


def cut(count: int) -> Damage:
    """Return a change that removes bytes at the end of a file."""
    return lambda file: os.truncate(file, file.stat().st_size - count)


def instead(make: Damage) -> Damage:
    """Return a change that replaces a file by a special file."""

    def replace(file: Path) -> None:
        file.unlink()
        make(file)

    return replace


SPECIAL: dict[str, Damage] = {
    "missing": Path.unlink,
    "fifo": instead(os.mkfifo),
    "directory": instead(Path.mkdir),
    "loop": instead(lambda file: file.symlink_to(file.name)),
    "dangling link": instead(lambda file: file.symlink_to("/nonexistent/disk")),
    "device": instead(lambda file: file.symlink_to("/dev/zero")),
    "terabyte": lambda file: os.truncate(file, 2**40),
    "unreadable": lambda file: file.chmod(0),
}
"""Files, directories and links that no program writes there."""
