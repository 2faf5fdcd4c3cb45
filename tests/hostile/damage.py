"""Ways to damage a file of a run, a sweep or a checkpoint, drawn from a random generator.

Nothing but files is used, so that the same damage can be done to a run of any version. Every way is
a function of (rng, file) that says what it did; `damage` draws one of those that suit the file.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECRET = "outside-of-the-run-hunter2"
"""The content of files that links lead to; no command may show or change it."""
DEEP = "[" * 100_000 + "]" * 100_000
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
"""YAML of a few hundred bytes whose aliases stand for 10^11 values."""
VALUES: list[Any] = [
    None, True, -1, 0, 1.5, 10**30, 1e308, float("nan"), float("inf"), "", "text", "../../etc",
    "\ud800", "a\0b", "\x1b[31mred\n", "x" * 5000, [], {}, [1, [2, [3]]], {"a": {"b": None}},
    [None], {"": 0}, "~nosuchuser", "step-00000099",
]  # fmt: skip
"""JSON values that a field may be given in place of its own."""
Way = Callable[[random.Random, Path], str]


def damage(rng: random.Random, file: Path) -> str:
    """Damage a file in a way that suits its name; return what was done, in words."""
    ways: list[Way] = [*ANY]
    if file.suffix in (".json", ".jsonl"):
        ways += 3 * JSON
    if file.suffix in (".yaml", ".yml"):
        ways += YAML
    way = rng.choice(ways)
    try:
        return f"{file.name}: {way(rng, file)}"
    except (ValueError, IndexError):  # it, or its manifest, is damaged already
        return f"{file.name}: {garbage(rng, file)}"


def removed(rng: random.Random, file: Path) -> str:
    remove(file)
    return "removed"


def empty(rng: random.Random, file: Path) -> str:
    file.write_bytes(b"")
    return "empty"


def garbage(rng: random.Random, file: Path) -> str:
    size = rng.choice([1, 10, 1000])
    file.write_bytes(rng.randbytes(size))
    return f"{size} random bytes"


def truncated(rng: random.Random, file: Path) -> str:
    content = file.read_bytes()
    size = int(rng.random() * len(content))  # one draw, however long the file is
    file.write_bytes(content[:size])
    return f"cut to {size} bytes"


def bit_flips(rng: random.Random, file: Path) -> str:
    content = bytearray(file.read_bytes())
    count = rng.choice([1, 1, 5, 50])
    for _ in range(count if content else 0):
        content[int(rng.random() * len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return f"{count} bits flipped"


def huge(rng: random.Random, file: Path) -> str:
    """Sparse, so that it takes no disk."""
    with open(file, "r+b") as stream:
        stream.truncate(2**40)
    return "a terabyte of zeros behind it"


def no_utf8(rng: random.Random, file: Path) -> str:
    file.write_bytes(b"\xff\xfe" + file.read_bytes())
    return "not UTF-8"


def pipe(rng: random.Random, file: Path) -> str:
    remove(file)
    os.mkfifo(file)
    return "a pipe"


def directory(rng: random.Random, file: Path) -> str:
    remove(file)
    file.mkdir()
    if rng.random() < 0.5:
        (file / "inside").write_text(SECRET)
    return "a directory"


def unreadable(rng: random.Random, file: Path) -> str:
    """For root, who can read all files, this is none."""
    file.chmod(0)
    return "unreadable"


def link_outside(rng: random.Random, file: Path) -> str:
    target = outside(file)
    target.write_text(SECRET)
    return linked(file, target, "a file outside")


def link_to_its_copy(rng: random.Random, file: Path) -> str:
    target = outside(file)
    shutil.copy(file, target)
    return linked(file, target, "a copy of it outside")


def link_inside(rng: random.Random, file: Path) -> str:
    others = sorted(other.name for other in file.parent.iterdir() if other != file)
    return linked(file, Path(rng.choice(others or ["."])), "a neighbour")


def link_dangling(rng: random.Random, file: Path) -> str:
    return linked(file, Path("/nonexistent/of/nobody"), "nothing")


def link_loop(rng: random.Random, file: Path) -> str:
    return linked(file, Path(file.name), "itself")


def link_to_a_device(rng: random.Random, file: Path) -> str:
    return linked(file, Path(rng.choice(["/dev/null", "/dev/zero", "/dev/full"])), "a device")


ANY: list[Way] = [
    removed, empty, garbage, truncated, bit_flips, huge, no_utf8, pipe, directory, unreadable,
    link_outside, link_to_its_copy, link_inside, link_dangling, link_loop, link_to_a_device,
]  # fmt: skip


def wrong_type(rng: random.Random, file: Path) -> str:
    value = rng.choice([v for v in VALUES if not isinstance(v, dict)])
    file.write_text(json.dumps(value), errors="surrogatepass")
    return f"{described(value)} in place of the object"


def deep(rng: random.Random, file: Path) -> str:
    file.write_text(rng.choice([DEEP, '{"a": ' + DEEP + "}", "[" * 500 + "]" * 500]))
    return "deep"


def changed_field(rng: random.Random, file: Path) -> str:
    """A field anywhere in the object, or in one of the lines, is missing, another or new."""
    text = file.read_text()
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    if not lines:
        return empty(rng, file)
    number = rng.randrange(len(lines))
    content = json.loads(lines[number])
    said = change(rng, content)
    lines[number] = json.dumps(content, indent=None if file.suffix == ".jsonl" else 2)
    file.write_text("\n".join(lines) + "\n")
    return said


def signed_change(rng: random.Random, file: Path) -> str:
    """A changed field, and in a checkpoint a manifest that agrees with it."""
    said = changed_field(rng, file)
    manifest = file.parent / "manifest.json"
    if file != manifest and manifest.is_file() and manifest.stat().st_size < 2**20:
        sign(manifest, file)
        said += ", signed"
    return said


JSON: list[Way] = [wrong_type, deep, signed_change, signed_change, signed_change]


def aliases(rng: random.Random, file: Path) -> str:
    file.write_text(BOMB + (file.read_text() if rng.random() < 0.5 else ""))
    return "aliases that never end"


def alias_in_place(rng: random.Random, file: Path) -> str:
    lines = file.read_text().splitlines()
    file.write_text("\n".join([BOMB, *lines, "seed: *a11"]) + "\n")
    return "aliases in place of the seed"


def deep_yaml(rng: random.Random, file: Path) -> str:
    file.write_text("a: " + "[" * 5000 + "]" * 5000 + "\n")
    return "deep"


def changed_line(rng: random.Random, file: Path) -> str:
    """One line's value is another."""
    lines = file.read_text().splitlines()
    number = rng.randrange(len(lines))
    key, colon, _ = lines[number].partition(":")
    value = rng.choice(["null", "[]", "{}", "-1", "1.0e+400", "'\\0'", "\"\\ud800\"", "${seed}",
                        "!!python/name:os.system", "&a 3", "*a", "text"])  # fmt: skip
    lines[number] = f"{key}{colon} {value}"
    file.write_text("\n".join(lines) + "\n")
    return f"{lines[number].strip()!r}"


YAML: list[Way] = [aliases, alias_in_place, deep_yaml, changed_line, changed_line, changed_line]


def change(rng: random.Random, content: Any) -> str:
    """Change a JSON value somewhere inside; return what was done."""
    place, path = content, []
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        if not keys:
            break
        key = rng.choice(list(keys))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.4:
            break
        place, path = inner, [*path, key]
    if not isinstance(place, dict | list):
        return "unchanged"
    where = ".".join(map(str, path)) or "the object"
    value, kind = rng.choice(VALUES), rng.randrange(6)
    if not place or kind == 0:
        if isinstance(place, dict):
            place[rng.choice(["new", "\ud800", "", "../x", "a\0b"])] = value
        else:
            place.append(value)
        return f"{described(value)} added to {where}"
    if kind == 1:
        del place[key]
        return f"{key!r} of {where} removed"
    place[key] = value
    return f"{key!r} of {where} is {described(value)}"


def described(value: Any) -> str:
    return ascii(value)[:40]


def sign(manifest: Path, file: Path) -> None:
    """Make a manifest agree with a file that was changed."""
    content = json.loads(manifest.read_text())
    data = file.read_bytes()
    content["files"][file.name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(content, indent=1))


def outside(file: Path) -> Path:
    """A file that belongs to no run, beside the topmost directory that this module may write."""
    place = next((p for p in file.parents if p.name == "outputs"), file.parent.parent).parent
    return place / f"outside-{file.name.lstrip('.')}"


def linked(file: Path, target: Path, what: str) -> str:
    remove(file)
    file.symlink_to(target)
    return f"a link to {what}"


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def take_away(rng: random.Random, path: Path, outside: Path) -> str:
    """Move a directory out to `outside`, and perhaps put something else in its place."""
    target = outside / f"outside-{path.name}"
    shutil.move(path, target)
    what = rng.choice(["gone", "a link to where it was moved", "a file", "a link to nothing"])
    if what == "a link to where it was moved":
        path.symlink_to(target)
    elif what == "a file":
        path.write_text("a file")
    elif what == "a link to nothing":
        path.symlink_to("/nonexistent/disk")
    return f"{path.name}: {what}"
