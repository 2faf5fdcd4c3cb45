"""The rules that every command has to keep, whatever it is given.

A mistake ends with exit code 2 and exactly one line on standard error that begins with `error:`;
everything else ends with 0. There is never a traceback and never a hang; a refusal leaves the run's
metrics as they were, and nothing outside of a run's directory is ever written to.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from hostile.commands import Ended

FINISHED, REFUSED, DIVERGED = "finished", "refused", "diverged"
SIDE = ("warning: ", "preparing tokens: ", "prepared ", "packing ", "packed ", "training a ")
"""Beginnings of lines on standard error that are no errors."""


def broken_rules(
    ended: Ended,
    expected: Collection[str],
    heard: bool = True,
    codes: Collection[int] = (0, 2),
) -> list[str]:
    """List the rules that a command broke.

    Args:
        expected: the ends that are right: FINISHED, REFUSED, DIVERGED.
        heard: whether what it says on standard error arrives.
        codes: the exit codes that there may be.
    """
    if ended.code is None:
        return ["it hangs"]
    broken = []
    if "Traceback (most recent call last)" in ended.out + ended.err:
        broken.append(f"a traceback that ends with {last_line(ended.err)}")
    if ended.code not in codes:
        broken.append(f"exit code {ended.code}: {last_line(ended.err)}")
    errors = [line for line in ended.err.splitlines() if line.startswith("error:")]
    others = [line for line in ended.err.splitlines() if not line.startswith(("error:", *SIDE))]
    if ended.code == 2 and heard and not broken:
        if len(errors) != 1:
            broken.append(f"{len(errors)} lines of errors")
        if others:
            broken.append(f"more than its error on stderr: {others[0][:200]}")
    right = REFUSED in expected if ended.code == 2 else bool({FINISHED, DIVERGED} & set(expected))
    if ended.code in (0, 2) and not right:
        broken.append(f"exit code {ended.code}, but it has to be {' or '.join(sorted(expected))}")
    return broken


def last_line(text: str) -> str:
    """Return the last line of a text, at most 200 characters of it."""
    return text.strip().rpartition("\n")[2][:200]


def contents(root: Path) -> dict[str, bytes | str]:
    """Return everything below a directory by its path: bytes of files, targets of links."""
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file():
            found[name] = path.read_bytes()
        else:
            found[name] = "directory" if path.is_dir() else "special"
    return found


def differences(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """List what appeared, vanished or changed."""
    changed = [name for name in before.keys() & after.keys() if before[name] != after[name]]
    return [
        *(f"{name} appeared" for name in sorted(after.keys() - before.keys())),
        *(f"{name} vanished" for name in sorted(before.keys() - after.keys())),
        *(f"{name} changed" for name in sorted(changed)),
    ]
