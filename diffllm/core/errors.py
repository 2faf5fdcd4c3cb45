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


def printable(text: str, unescaped: str = "") -> str:
    """Escape unprintable characters, such as control characters, except those in `unescaped`."""
    characters = []
    for character in text:
        if not (character.isprintable() or character in unescaped):
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def listed(parts: Sequence[str]) -> str:
    shown = list(parts[:5])
    if len(parts) > 5:
        shown.append("...")
    return "; ".join(shown)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return '; did you mean x?' for the most similar known name, or '' if no name is similar.

    Compare full names first, then the last parts of dotted names. Ignore case. If several names
    have the same last part, choose the first name with the fewest parts.
    """
    by_name = {candidate.lower(): candidate for candidate in candidates}
    by_depth = sorted(by_name.items(), key=lambda item: item[0].count("."))
    # Reversed: of several candidates with one last part, the first of `by_depth` remains.
    by_last_part = {key.rpartition(".")[2]: candidate for key, candidate in reversed(by_depth)}
    last_part = name.rpartition(".")[2]
    for text, names, cutoff in ((name, by_name, 0.8), (last_part, by_last_part, 0.6)):
        similar = difflib.get_close_matches(text.lower(), names, n=1, cutoff=cutoff)
        if similar:
            return f"; did you mean {names[similar[0]]}?"
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
    command_line = NUL.join(words)[:SEARCHED]
    for shape, fix in SHAPES.items():
        # NUL, or an end of the command line, on both sides: a match contains complete words.
        for match in re.finditer(rf"(?<![^\0])(?:{shape})(?![^\0])", command_line):
            matched_words = NUL.join(filter(None, match.groups())).split(NUL)
            if any(repr(word) in error for word in matched_words):
                return f"; {fix(match)}".replace(NUL, " ")
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key not in error or value not in error:
            continue
        number = number_meant(value, error)
        if number:
            advice = "write one number as" if SEVERAL in error else "write"
            return f"; {advice} {key}={number}"
    return ""


def number_meant(text: str, error: str) -> str:
    """Rewrite the number in `text` in Python's notation, for example "10M" as "10e6".

    Hydra has rejected `text` with the message `error`. Return "" if this message does not ask for a
    number. Also return "" if `text` already has Python's notation or is not a number.
    """
    is_integer = "an integer" in error
    is_real = "a number" in error
    if not (is_integer or is_real or SEVERAL in error):
        return ""
    comma = ","
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", text):
        # Commas between thousands, as in 1,000,000.
        comma = ""
    elif is_real or re.match("-?0,0", text):
        # A decimal comma, as in 0,001.
        comma = "."
    match = re.fullmatch(
        r"(-?\d{0,20}\.?\d{1,20})(e-?\d\d?|[kmbt]?)", text.replace(",", comma), re.I
    )
    if not match:
        return ""
    number = match[1] + POWERS.get(match[2].lower(), match[2])
    if is_integer:
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
