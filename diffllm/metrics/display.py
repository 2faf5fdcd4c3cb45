"""Progress of a run: a live line on a terminal, plain lines in other output, and a log file."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from diffllm.core.console import Console
from diffllm.core.errors import printable
from diffllm.core.files import open_to_append
from diffllm.core.printing import KEPT

SPIKE_TEXT = (
    "{spikes/loss_total:.0f} loss, {spikes/grad_total:.0f} gradient norm; without the trend: "
    "{spikes_detrended/loss_total:.0f}, {spikes_detrended/grad_total:.0f}"
)


class RunLog:
    """Log file of a run. Text is kept in memory until `open`. Write errors are ignored."""

    def __init__(self) -> None:
        self.waiting = ""
        self.descriptor: int | None = None
        self.stderr: Any = None

    def copy_stderr(self, errors_only: bool = False) -> None:
        """Copy standard error to the log until `close` is called.

        With `errors_only`, copy only text that begins with "error: ".
        """
        self.stderr = sys.stderr
        sys.stderr = Copied(sys.stderr, self.write_error if errors_only else self.write)

    def open(self, file: Path) -> None:
        with contextlib.suppress(OSError):
            self.descriptor = open_to_append(file)
        text, self.waiting = self.waiting, ""
        self.write(text)

    def write(self, text: str) -> None:
        if self.descriptor is None:
            self.waiting += text
            return
        with contextlib.suppress(OSError):
            os.write(self.descriptor, text.encode(errors="replace"))

    def write_error(self, text: str) -> None:
        if text.startswith("error: "):
            self.write(f"{text}\n")

    def close(self) -> None:
        """Close the log file and restore standard error."""
        if self.stderr is not None:
            sys.stderr, self.stderr = self.stderr, None
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Copied:
    """Stream wrapper that calls `copy` with all written text that does not move the cursor."""

    def __init__(self, stream: Any, copy: Callable[[str], None]):
        self.stream, self.copy = stream, copy

    def write(self, text: str) -> int:
        written: int = self.stream.write(text)
        # rich redraws its progress bar with escape sequences and carriage returns.
        if "\x1b" not in text and "\r" not in text:
            self.copy(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


SAY_S = 30
"""Seconds between progress lines of an evaluation if no bar is shown."""


class Display:
    """Shows the progress of a run on standard output, and in the log of the run.

    If `enabled` is False, nothing is shown or logged.
    """

    def __init__(self, steps: int, enabled: bool = True, log: RunLog | None = None):
        self.steps, self.enabled = steps, enabled
        self.log = log or RunLog()
        self.staying = 0
        """First step whose line remains on a terminal above the live line."""
        self.console = Console(soft_wrap=True)
        self.live: Progress | None = None
        self.evaluating: tuple[float, float] | None = None
        """Start time of the current evaluation, and time of its last line."""

    def start(self, step: int) -> None:
        """Start the progress bar at optimizer step `step` if standard output is a terminal."""
        if self.enabled and self.console.is_terminal:
            self.live = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[status]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.live.start()
            # rich has replaced sys.stderr until `stop`; copy its text to the log too.
            sys.stderr = Copied(sys.stderr, self.log.write)
            self.task = self.live.add_task("", total=self.steps, completed=step, status="")

    def advance(self, step: int) -> None:
        if self.live:
            self.live.update(self.task, completed=step)

    def show(self, step: int, values: dict[str, Any], eta_s: float) -> None:
        """Print the metrics of a logged step.

        On a terminal, update the progress bar. Some of the steps, and all steps with a held-out
        loss, also print a line above the bar. In other output and in the log, every logged step
        has a line.

        Args:
            values: metrics by name, such as "train/loss".
            eta_s: estimated seconds until the end of the run.
        """
        if not self.enabled:
            return
        loss, speed = values["train/loss"], values["perf/tokens_per_s"]
        line = (
            f"step {step:>{len(str(self.steps))}}/{self.steps}  "
            f"loss {loss:.3f}{bits_per_byte(values, 'train')}  "
            f"grad {values['train/grad_norm']:.2f}  lr {values['train/lr']:.1e}  {speed:,.0f} tok/s"
            f"{''.join(f'  {part}' for part in evaluation_texts(values))}"
        )
        if self.live:
            newest = f"loss {loss:.3f}  {speed:,.0f} tok/s"
            self.live.update(self.task, completed=step, status=newest)
            if step >= min(self.staying, self.steps) or "eval/loss" in values:
                self.console.print(line)
                self.staying = step + max(1, min(step // 4, self.steps // 20))
            self.log.write(f"{line}\n")
        else:
            self.print(f"{line}  ETA {duration(eta_s)}")

    def evaluate(self, done: int, total: int) -> None:
        """Show that a held-out evaluation has processed `done` of `total` tokens.

        On a terminal, update the progress bar. In other output, print a line every 30 s.
        """
        now = time.monotonic()
        self.evaluating = self.evaluating or (now, now)
        started_at, printed_at = self.evaluating
        text = f"held-out loss: {done:,} of {total:,} tokens"
        if self.live:
            self.live.update(self.task, status=text)
        elif now - printed_at >= SAY_S:
            eta_s = (now - started_at) * (total - done) / max(done, 1)
            self.print(f"{text}  ETA {duration(eta_s)}")
            self.evaluating = started_at, now

    def print(self, text: str) -> None:
        if self.enabled:
            self.console.print(text)
            self.log.write(f"{printable(text, KEPT)}\n")

    def stop(self) -> None:
        if self.live:
            self.live.stop()
            self.live = None


def evaluation_texts(values: Mapping[str, Any]) -> list[str]:
    """Format each held-out loss or task accuracy in `values` as a text, such as "needle 0.52"."""
    texts = []
    if "eval/loss" in values:
        texts.append(f"held-out {values['eval/loss']:.3f}{bits_per_byte(values, 'eval')}")
    for name, value in values.items():
        # The metric of a level of a task has a second slash.
        if not name.startswith("tasks/") or name.count("/") != 1:
            continue
        task = name.removeprefix("tasks/")
        chance = values.get(f"tasks_chance/{task}")
        note = "" if chance is None else f" (chance {chance:.2f})"
        texts.append(f"{task} {value:.2f}{note}")
    return texts


def bits_per_byte(values: Mapping[str, Any], split: str) -> str:
    """Return the metric `<split>/bits_per_byte` as text, such as " (0.98 b/B)"; "" if missing."""
    value = values.get(f"{split}/bits_per_byte")
    return "" if value is None else f" ({value:.2f} b/B)"


def frequency_text(loss: float, entropy: float) -> str:
    """Compare a loss with the entropy of the token frequencies, both in nats per token.

    The entropy is the loss of a model that knows only how frequent each token is.
    """
    side = "better" if loss <= entropy else "worse"
    return f"{abs(entropy - loss):.2f} {side} than word frequencies alone"


def spike_text(counts: Mapping[str, Any]) -> str:
    """Describe the numbers of spikes: in loss and gradient norm, then in both without the trend."""
    return SPIKE_TEXT.format_map(counts)


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss or m:ss."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
