"""Damaged files are refused with their path in one line, or read with usable values."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diffllm.core.errors import UserError
from hostile.damage import SPECIAL, Damage, damaged, structured, try_all
from hostile.files import FILES
from hostile.table import DAMAGES

Copy = Callable[[str], Path]


def rows() -> Iterator[tuple[str, Damage, str]]:
    for name, damages in DAMAGES.items():
        for damage, message in damages:
            yield name, damage, message


@pytest.mark.fuzz
@pytest.mark.parametrize("name", [name for name, entry in FILES.items() if entry.examples])
def test_reader_of_drawn_content_raises_user_error_or_returns_usable_values(
    copy: Copy, name: str
) -> None:
    entry = FILES[name]
    place = copy(entry.place)
    file = entry.files(place)[0]
    valid, whole = entry.outcome(place, [file]), file.read_bytes()
    assert not isinstance(valid, UserError)

    def check(content: bytes) -> None:
        file.write_bytes(content)
        value = entry.outcome(place, [file])
        if not isinstance(value, UserError):
            entry.check(value, valid)

    edits = structured(file)
    try_all(check, damaged(whole) if edits is None else damaged(whole) | edits, entry.examples)


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("signed")])
def test_reader_of_special_file_raises_user_error_or_returns_usable_values(
    copy: Copy, name: str
) -> None:
    entry = FILES[name]
    valid = entry.read(copy(entry.place))
    for damage in SPECIAL.values():
        place = copy(entry.place)
        files = entry.files(place)
        for file in files:
            damage(file)
        value = entry.outcome(place, files)
        if value is not None and not isinstance(value, UserError):
            entry.check(value, valid)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    rows(),
)
def test_error_of_damaged_file_names_file_and_damage(
    copy: Copy, name: str, damage: Damage, message: str
) -> None:
    entry = FILES[name]
    place = copy(entry.place)
    files = entry.files(place)
    for file in files:
        damage(file)
    error = entry.outcome(place, files)
    assert isinstance(error, UserError), f"no error about {message}"
    assert re.search(message, str(error)), error
