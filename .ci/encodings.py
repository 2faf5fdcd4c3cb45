"""Find text that is read or written in the encoding of the locale, for lack of `encoding=`.

`python .ci/encodings.py` prints these calls and fails if there are any; `--fix` adds
encoding="utf-8". The rule of ruff (PLW1514) finds a sixth of them: only paths with a known type.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT_METHODS = {"read_text": 0, "write_text": 1}
"""Methods of paths, and the position of their argument `encoding`."""
OPENERS = {"open": 1, "fdopen": 1}
"""Functions that open text by default, and the position of their argument `mode`."""
TEMPORARY = {"NamedTemporaryFile": 0, "TemporaryFile": 0, "SpooledTemporaryFile": 1}
"""Functions that open bytes by default, and the position of their argument `mode`."""
BINARY = ("gzip", "bz2", "lzma", "zstandard")
"""Modules whose function `open` opens bytes by default."""
OTHER = ("os", "tarfile", "zipfile", "webbrowser")
"""Modules whose function `open` opens no text."""
MODES = set("rwxabt+")


def argument(call: ast.Call, name: str, position: int) -> object:
    """Return a constant argument of a call; None if it is missing or not a constant."""
    values = [keyword.value for keyword in call.keywords if keyword.arg == name]
    values += call.args[position : position + 1]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None


def as_text(call: ast.Call) -> ast.keyword | None:
    """Return the argument text=True of a call that starts a process."""
    for keyword in call.keywords:
        is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if keyword.arg == "text" and is_true:
            return keyword
    return None


def lacks_encoding(call: ast.Call) -> bool:
    if any(keyword.arg in ("encoding", None) for keyword in call.keywords):
        return False
    if as_text(call):
        return True
    function = call.func
    owner = function.value if isinstance(function, ast.Attribute) else None
    name = getattr(function, "attr", getattr(function, "id", ""))
    module = owner.id if isinstance(owner, ast.Name) else ""
    if owner and name in TEXT_METHODS:
        return len(call.args) <= TEXT_METHODS[name]
    if name in TEMPORARY:
        mode = argument(call, "mode", TEMPORARY[name])
        return isinstance(mode, str) and "b" not in mode
    if name == "open" and module in BINARY:
        return "t" in str(argument(call, "mode", 1) or "")
    if name == "fdopen" or (name == "open" and (owner is None or module == "io")):
        return "b" not in str(argument(call, "mode", OPENERS[name]) or "r")
    if name != "open" or module in OTHER:
        return False
    if not call.args and not call.keywords:
        return True  # Path.open()
    mode = argument(call, "mode", 0)  # Path.open(mode); other methods get a path
    return isinstance(mode, str) and set(mode) <= MODES and "b" not in mode


def calls(source: str) -> Iterator[ast.Call]:
    nodes = list(ast.walk(ast.parse(source)))
    statements = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if not isinstance(node, ast.Call) or not lacks_encoding(node):
            continue
        if node in statements and not (node.args or node.keywords):
            continue  # the statement gate.open() opens no file, because its result is unused
        yield node


def fixed(source: str) -> str:
    content = source.encode()
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    edits = []
    for call in calls(source):
        if keyword := as_text(call):  # implied by an encoding
            begin = starts[keyword.lineno - 1] + keyword.col_offset
            end = starts[keyword.end_lineno - 1] + keyword.end_col_offset
            edits.append((begin, end, b""))
        else:
            begin = end = starts[call.end_lineno - 1] + call.end_col_offset - 1
            before = content[:end].rstrip()
            edits.append((begin, end, b"" if before.endswith((b"(", b",")) else b", "))
    for begin, end, comma in sorted(edits, reverse=True):
        content = content[:begin] + comma + b'encoding="utf-8"' + content[end:]
    return content.decode()


def main(words: list[str]) -> int:
    names = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True)
    number = 0
    for path in (ROOT / name for name in names.stdout.decode().split()):
        source = path.read_text(encoding="utf-8")
        if words == ["--fix"]:
            path.write_text(fixed(source), encoding="utf-8")
            continue
        for call in calls(source):
            print(f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)[:80]}")
            number += 1
    if number:
        print(f"{number} calls without encoding=; python .ci/encodings.py --fix adds it")
    return int(number > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
