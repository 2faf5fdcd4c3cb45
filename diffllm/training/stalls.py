"""Events of stalls, for events.jsonl and for wandb."""

from contextlib import suppress
from pathlib import Path

from diffllm.metrics.events import Event, append_stall
from diffllm.metrics.wandb_run import WandbRun
from diffllm.training.state import LoopState


def record_stall(run: Path, state: LoopState, message: str) -> None:
    """Write a stall to events.jsonl.

    A full or missing disk is ignored, because the message is also on stderr.
    """
    with suppress(OSError):
        append_stall(run, stall(state, message))


def alert_stall(wandb: WandbRun, state: LoopState, message: str) -> None:
    wandb.add_event(stall(state, message))


def stall(state: LoopState, message: str) -> Event:
    """Return the event of a stall; arguments as in `record_stall`."""
    return Event("stall", state.step, state.tokens, detail=message)
