"""How far a preparation is: a bar on a terminal, a line a minute in a file and elsewhere."""

import os
import time
from datetime import datetime
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn

from diffllm.core.console import Console
from diffllm.core.files import open_to_append
from diffllm.core.printing import to_stderr

EVERY = 60.0
"""Seconds between two lines, and after which a worker without progress is named."""


class Reporter:
    """Says how far a preparation is: on a terminal at once, in a log once a minute."""

    def __init__(self, log: Path) -> None:
        console = Console(stderr=True)
        self.on_terminal = console.is_terminal
        self._log = log
        self._bar = Progress(
            TextColumn("tokenising"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.description}"),
            console=console, transient=True, disable=not self.on_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=1.0)
        self._started = time.monotonic()
        self._next_line = self._started + EVERY
        self._encoded, self._went_on = 0, self._started

    def __enter__(self) -> "Reporter":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(
        self, share: float, before: float, text_bytes: int, tokens: int, reading: list[str]
    ) -> None:
        """Say how far it is.

        Args:
            share: what is done of all, up to 1.
            before: what of that had been done at the start.
            text_bytes, tokens: what has been encoded since then.
            reading: what is being read or waited for, which is named if it gives nothing for long.
        """
        now = time.monotonic()
        seconds = max(now - self._started, 1e-9)
        said = f"{rates(text_bytes, tokens, seconds)}{remaining(share, before, seconds)}"
        self._bar.update(self._task, completed=share, description=said)
        if text_bytes != self._encoded:
            self._encoded, self._went_on = text_bytes, now
        if now >= self._next_line:
            self._next_line += EVERY
            idle = now - self._went_on
            if idle < EVERY or not reading:
                self.line(f"{share:4.0%}  {said}")
            else:
                names = ", ".join(reading[:3]) + ", ..." * (len(reading) > 3)
                self.line(f"nothing for {idle:.0f} s; waiting for {names}", urgent=True)

    def line(self, text: str, urgent: bool = False) -> None:
        """Append a line to the log, and print it if it is urgent or there is no bar."""
        with os.fdopen(open_to_append(self._log), "a") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {text}\n")
        if urgent or not self.on_terminal:
            to_stderr(text)


def rates(text_bytes: int, tokens: int, seconds: float) -> str:
    """Say how much has been encoded, and how fast."""
    speed = f"{text_bytes / 1e6 / seconds:,.1f} MB/s, {tokens / seconds:,.0f} tokens/s"
    return f"{text_bytes / 1e6:,.0f} MB, {tokens / 1e6:,.1f}M tokens; {speed}"


def remaining(share: float, before: float, seconds: float) -> str:
    """Say how long it will take, once enough is done to tell."""
    if share - before < 1e-3:
        return ""
    left = round(seconds * (1 - share) / (share - before))
    return f"; ETA {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
