"""Damaged files are refused with their path in one line, or read with usable values."""

import re

import pytest

from diffllm.core.errors import UserError
from hostile.damage import SPECIAL, Damage, damaged, structured, try_all
from hostile.files import FILES
from hostile.table import DAMAGES

FOLLOWED = ("inputs", "imported", "tokenizer", "llama", "qwen3_moe", "differential", "sharded")
"""Directories in which users may link files of other places."""
REFUSED = ("run", "sweep", "checkpoint")
"""Directories whose links are never read, because a link could lead to a secret."""
UNSIGNED = [name for name in FILES if not name.startswith("signed")]


def rows() -> list[tuple[str, Damage, str]]:
    table = []
    for name, damages in DAMAGES.items():
        table += [(name, damage, message) for damage, message in damages]
    return table


@pytest.mark.fuzz
@pytest.mark.parametrize("name", [name for name, entry in FILES.items() if entry.examples])
def test_reader_of_drawn_content_raises_user_error_or_returns_usable_values(copy, name):
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


@pytest.mark.parametrize("name", UNSIGNED)
def test_reader_of_special_file_raises_user_error_or_returns_usable_values(copy, name):
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


@pytest.mark.parametrize(("name", "damage", "message"), rows())
def test_error_of_damaged_file_names_file_and_damage(copy, name, damage, message):
    entry = FILES[name]
    place = copy(entry.place)
    files = entry.files(place)
    for file in files:
        damage(file)
    error = entry.outcome(place, files)
    assert isinstance(error, UserError), f"no error about {message}"
    assert re.search(message, str(error)), error


@pytest.mark.parametrize("name", UNSIGNED)
def test_links_are_followed_only_in_files_of_users_and_models(copy, tmp_path, name):
    entry = FILES[name]
    place = copy(entry.place)
    for file in entry.files(place):
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
        value = entry.outcome(place, [file])
        if entry.place in FOLLOWED:
            assert not isinstance(value, UserError)
        elif entry.place in REFUSED:
            assert re.search("is (a link or )?not a regular file", str(value))
