"""Output of a run on a terminal, in a pipe and in the log."""

import io
import itertools
import sys
from typing import Any

from diffllm.core.console import Console
from diffllm.core.printing import to_stderr
from diffllm.data import progress
from diffllm.metrics.display import Copied, Display, RunLog, frequency_text, spike_text

STEPS = 2000


def step_values(step: int, **more: float) -> dict[str, Any]:
    """Return metrics whose loss equals the step."""
    return {
        "train/loss": float(step), "train/grad_norm": 1.0, "train/lr": 1e-3,
        "perf/tokens_per_s": 1000.0, **more,
    }  # fmt: skip


def show_steps(display: Display, steps: list[int], evaluated: int = 0) -> None:
    display.start(0)
    for step in steps:
        more = {"eval/loss": 9.0} if step == evaluated else {}
        display.show(step, step_values(step, **more), 1.0)
    display.stop()


def on_terminal(log: RunLog | None = None) -> tuple[Display, io.StringIO]:
    """Return a display on a simulated terminal, and the terminal's output."""
    display, screen = Display(STEPS, log=log), io.StringIO()
    display.console = Console(file=screen, force_terminal=True, width=120, soft_wrap=True)
    return display, screen


def staying(screen: str) -> list[int]:
    """Return the steps whose lines remain on a screen."""
    lines = [line.rpartition("\x1b[2K")[2] for line in screen.splitlines()]
    return [int(line[5:].split("/")[0]) for line in lines if "grad" in line]


def test_progress_display_leaves_20_to_50_loss_lines_on_terminal():
    """The lines include the first and the last step, and more steps at the start."""
    display, screen = on_terminal()
    show_steps(display, [1, *range(10, STEPS + 1, 10)])
    steps = staying(screen.getvalue())
    assert steps[:4] == [1, 10, 20, 30]
    assert steps[-1] == STEPS
    assert 20 <= len(steps) <= 50
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert max(gaps) <= STEPS // 20 + 10


def test_progress_display_prints_one_line_per_heldout_loss():
    display, screen = on_terminal()
    show_steps(display, [1, *range(10, STEPS + 1, 10)], evaluated=1010)
    assert 1010 in staying(screen.getvalue())
    assert "step 1010/2000  loss 1010.000" in screen.getvalue()
    assert "held-out 9.000" in screen.getvalue()


def test_run_log_contains_every_logged_step_and_warning(tmp_path, capsys):
    """While the bar is shown, rich replaces standard error."""
    log = RunLog()
    log.copy_stderr()
    display, _ = on_terminal(log)
    display.print("before")
    log.open(tmp_path / "run.log")
    display.start(0)
    to_stderr("warning: next to the bar")
    display.show(10, step_values(10), 1.0)
    display.stop()
    to_stderr("warning: after it")
    log.close()
    to_stderr("warning: of another run")
    lines = (tmp_path / "run.log").read_text(encoding="utf-8").splitlines()
    assert lines == [
        "before",
        "warning: next to the bar",
        "step   10/2000  loss 10.000  grad 1.00  lr 1.0e-03  1,000 tok/s",
        "warning: after it",
    ]
    assert not isinstance(sys.stderr, Copied)


def test_stage_names_are_written_to_stderr_if_console_is_not_a_terminal(monkeypatch, capsys):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(progress, "Console", lambda **_: terminal)
    with progress.stages() as say:
        say("first [a]")
        say("second")
    assert "second" in screen.getvalue()
    assert capsys.readouterr().err == ""
    monkeypatch.undo()
    with progress.stages() as say:
        say("first [a]")
        say("second")
    assert capsys.readouterr().err == "first [a]\nsecond\n"


def test_texts_at_end_of_run_name_loss_against_word_frequencies_and_spikes():
    assert frequency_text(4.87, 6.199) == "1.33 better than word frequencies alone"
    assert frequency_text(6.25, 6.0) == "0.25 worse than word frequencies alone"
    counts = {
        "spikes/loss_total": 0.0, "spikes/grad_total": 1.0,
        "spikes_detrended/loss_total": 0.0, "spikes_detrended/grad_total": 2.0,
    }  # fmt: skip
    assert spike_text(counts) == "0 loss, 1 gradient norm; without the trend: 0, 2"
