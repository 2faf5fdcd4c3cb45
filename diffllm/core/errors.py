"""Errors that a user can act on: each ends in one line on stderr and exit code 2, no traceback."""

import difflib
from collections.abc import Iterable, Sequence

LONGEST = 1500
"""Characters of a message; of a longer one the middle is left out."""


class UserError(Exception):
    """Something outside the code is wrong; the message, one printable line, says what is
    allowed."""

    def __init__(self, message: str) -> None:
        line = printable(" ".join(message.split("\n")))
        if len(line) > LONGEST:
            line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
        super().__init__(line)


def printable(text: str, kept: str = "") -> str:
    """Escape what a terminal may act on: control characters, line breaks and direction marks."""
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text
    )


def listed(parts: Sequence[str]) -> str:
    return "; ".join([*parts[:5], *["..."] * (len(parts) > 5)])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean x?' for the most similar name, else by the last part of dotted names.

    Upper and lower case are equal. Return '' if no name is similar.
    """
    whole = {each.lower(): each for each in known}
    last = {key.rpartition(".")[2]: each for key, each in reversed(whole.items())}
    for text, names, cutoff in ((name, whole, 0.8), (name.rpartition(".")[2], last, 0.6)):
        if close := difflib.get_close_matches(text.lower(), names, n=1, cutoff=cutoff):
            return f"; did you mean {names[close[0]]}?"
    return ""


def choose_from(name: str, options: Sequence[str]) -> str:
    return f"{did_you_mean(name, options) or ';'} choose from {', '.join(options)}"


class AgreedError(UserError):
    """An error of rank 0 that the other ranks share; rank 0 reports it."""


class AgreedByAll(AgreedError):
    """An error that every rank raises at the same point of training; rank 0 reports it."""


class ConfigError(UserError):
    """A configuration key, value or combination that cannot run."""


class InUseError(ConfigError):
    """A directory that another process holds."""


class DataError(UserError):
    """A corpus, tokenizer or token cache that cannot be used."""


class CheckpointError(UserError):
    """A run directory or checkpoint that cannot be used."""


class LaunchError(UserError):
    """Processes that were not started as a launcher starts them, or that do not meet."""
