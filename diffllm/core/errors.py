"""Errors that a user can fix. A command prints them as one line on stderr and exits with code 2."""

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal

LONGEST = 1500
"""Maximum characters of a message; the middle of a longer message is cut."""


class UserError(Exception):
    """An error that a user can fix; the message is one line of at most about 1,500 characters."""

    def __init__(self, message: str) -> None:
        line = printable(" ".join(message.split("\n")))
        if len(line) > LONGEST:
            line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
        super().__init__(line)


def printable(text: str, kept: str = "") -> str:
    """Escape unprintable characters, such as control characters, except those in `kept`."""
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text
    )


def listed(parts: Sequence[str]) -> str:
    return "; ".join([*parts[:5], *["..."] * (len(parts) > 5)])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean x?' for the most similar known name, or '' if no name is similar.

    Compare full names first, then the last parts of dotted names. Ignore case. If several names
    have the same last part, choose the first name with the fewest parts.
    """
    whole = {each.lower(): each for each in known}
    by_depth = sorted(whole.items(), key=lambda item: item[0].count("."))
    last = {key.rpartition(".")[2]: each for key, each in reversed(by_depth)}
    for text, names, cutoff in ((name, whole, 0.8), (name.rpartition(".")[2], last, 0.6)):
        if close := difflib.get_close_matches(text.lower(), names, n=1, cutoff=cutoff):
            return f"; did you mean {names[close[0]]}?"
    return ""


def choose_from(name: str, options: Sequence[str]) -> str:
    return f"{did_you_mean(name, options) or ';'} choose from {', '.join(options)}"


NUL, KEY, PLAIN = "\0", r"[\w.+~/@]+", r"[^\0=-][^\0=]*"
SHAPES: dict[str, Callable[[re.Match[str]], str]] = {
    rf"({KEY})(?:\0=\0?|=\0)({PLAIN})|{KEY}=\d+(?:\0(\d\d\d))+":
        lambda m: f"write {m[0].replace(NUL, '')} without spaces",
    rf"(--(?!config-)[\w.-]+(?:=[^\0]*|(?=\0{PLAIN}(?![^\0]))))":
        lambda m: f"write {m[0][2:].partition('=')[0].replace('-', '_')}=... without dashes",
    rf"({KEY}=(?:[^\0\[{{]*,(?:\0{PLAIN})+|[\[{{][^\0\]}}]*(?:\0[^\0=\]}}]+)*\0[^\0=]*[\]}}]))":
        lambda m: f"quote a value that contains spaces: {shlex.quote(m[0])}",
    rf"{KEY}=[^\0]+\0({PLAIN})": lambda m: "quote a value if it contains spaces",
}  # fmt: skip
"""Patterns of mistyped overrides, with NUL between two words, and the fix for a match.

An error must name at least one word in the groups of a pattern.
"""
SEARCHED = 4096
"""Maximum characters of a command line that are searched for SHAPES."""
SEVERAL = "several values"
POWERS = {"k": "e3", "m": "e6", "b": "e9", "t": "e12"}


def hint(words: list[str], error: str) -> str:
    """Return advice on a mistyped key=value argument, such as '; write lr=1e-3 without spaces'.

    Return '' if no known mistake is found.

    Args:
        words: all command-line arguments.
        error: error message of the command; only arguments in this message are examined.
    """
    if "did you mean" in error:
        return ""
    for shape, fix in SHAPES.items():
        for found in re.finditer(rf"(?<![^\0])(?:{shape})(?![^\0])", NUL.join(words)[:SEARCHED]):
            named = NUL.join(filter(None, found.groups())).split(NUL)
            if any(repr(word) in error for word in named):
                return f"; {fix(found)}".replace(NUL, " ")
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key in error and value in error and (number := number_meant(value, error)):
            return f"; write {'one number as ' * (SEVERAL in error)}{key}={number}"
    return ""


def number_meant(text: str, error: str) -> str:
    """Rewrite the number in `text` in Python's notation, for example "10M" as "10e6".

    Hydra has rejected `text` with the message `error`. Return "" if this message does not ask for a
    number. Also return "" if `text` already has Python's notation or is not a number.
    """
    whole, real = "an integer" in error, "a number" in error
    if not (whole or real or SEVERAL in error):
        return ""
    separated = re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", text)
    point = "" if separated else "." if real or re.match("-?0,0", text) else ","
    found = re.fullmatch(
        r"(-?\d{0,20}\.?\d{1,20})(e-?\d\d?|[kmbt]?)", text.replace(",", point), re.I
    )
    if not found:
        return ""
    number = found[1] + POWERS.get(found[2].lower(), found[2])
    if whole:
        exact = Decimal(number)
        number = str(int(exact)) if exact == exact.to_integral_value() else text
    return number if number != text else ""


class AgreedError(UserError):
    """Raised when all ranks fail for the same reason; only rank 0 prints the error message."""


class AgreedByAll(AgreedError):
    """An AgreedError that all ranks raise at the same point.

    Therefore, the ranks can still call collectives afterwards.
    """


class ConfigError(UserError):
    """An invalid configuration key, value or combination of values."""


class InUseError(ConfigError):
    """An attempt to use a directory that another process has locked."""


class DataError(UserError):
    """A corpus, tokenizer or token cache that cannot be used."""


class CheckpointError(UserError):
    """A run directory or checkpoint that cannot be used."""


class LaunchError(UserError):
    """A failed launch, for example if ranks are missing or differ in code or config."""
