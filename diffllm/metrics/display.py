"""The progress of a run for a person: a live line on a terminal, plain lines when piped."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from diffllm.core.errors import printable
from diffllm.core.printing import KEPT
from diffllm.core.printing.console import Console
from diffllm.metrics.log import Copied, RunLog

SAY_S = 30
"""Seconds between lines about an evaluation, where there is no bar."""


class Display:
    """Progress of one run on standard output, and in its log; silent on ranks other than 0."""

    def __init__(self, steps: int, enabled: bool = True, log: RunLog | None = None):
        self.steps, self.enabled = steps, enabled
        self.log = log or RunLog()
        self.staying = 0
        """The step from which on the next line stays on a terminal."""
        self.console = Console(soft_wrap=True)
        self.live: Progress | None = None
        self.evaluating: tuple[float, float] | None = None
        """The times at which the last evaluation began and was last spoken of."""

    def start(self, step: int) -> None:
        """Begin at optimizer step `step`."""
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
            sys.stderr = Copied(sys.stderr, self.log.write)  # rich's now, until `stop`
            self.task = self.live.add_task("", total=self.steps, completed=step, status="")

    def advance(self, step: int) -> None:
        """Move the bar; no numbers are read from the device for it."""
        if self.live:
            self.live.update(self.task, completed=step)

    def show(self, step: int, values: dict[str, Any], eta_s: float) -> None:
        """Report the values of a logged step.

        On a terminal the bar has the newest, and a line above it stays: of the first and the last
        step, and in between about as many as fit on a screen, denser at the beginning.
        """
        if not self.enabled:
            return
        loss, speed = values["train/loss"], values["perf/tokens_per_s"]
        line = (
            f"step {step:>{len(str(self.steps))}}/{self.steps}  "
            f"loss {loss:.3f}{bits(values, 'train')}  "
            f"grad {values['train/grad_norm']:.2f}  lr {values['train/lr']:.1e}  {speed:,.0f} tok/s"
        )
        line += "".join(f"  {part}" for part in measured(values))
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
        """Tell how many tokens of all held-out ones have been evaluated, once that takes long."""
        now = time.monotonic()
        began, said = self.evaluating = self.evaluating or (now, now)
        text = f"held-out loss: {done:,} of {total:,} tokens"
        if self.live:
            self.live.update(self.task, status=text)
        elif now - said >= SAY_S:
            self.print(f"{text}  ETA {duration((now - began) * (total - done) / max(done, 1))}")
            self.evaluating = began, now

    def print(self, text: str) -> None:
        """Print a line above the bar, and log the line."""
        if self.enabled:
            self.console.print(text)
            self.log.write(f"{printable(text, KEPT)}\n")

    def stop(self) -> None:
        """Remove the live line."""
        if self.live:
            self.live.stop()
            self.live = None


def measured(values: Mapping[str, Any]) -> list[str]:
    """Say the held-out loss and the shares of right answers that a line has."""
    said = []
    if "eval/loss" in values:
        said.append(f"held-out {values['eval/loss']:.3f}{bits(values, 'eval')}")
    for name, value in values.items():
        first, _, task = name.partition("/")
        if first == "tasks" and "/" not in task:
            said.append(f"{task} {value:.2f}")
    return said


def bits(values: Mapping[str, Any], of: str) -> str:
    """Return a loss of "train" or "eval" in bits a byte, to stand behind it; nothing if unknown."""
    value = values.get(f"{of}/bits_per_byte")
    return "" if value is None else f" ({value:.2f} b/B)"


def duration(seconds: float) -> str:
    """h:mm:ss or m:ss."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
