"""The `diffllm` console script: one module a subcommand."""

import difflib
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from diffllm.errors import UserError

COMMANDS = {
    "train": "train a decoder, or with -m a sweep of them; the same as python train.py",
    "prepare": "make a corpus's tokenizer and token shards ahead of a run",
    "count": "parameters, FLOPs and KV cache of a model",
    "plan": "memory, communication and time of a run on a cluster, without the cluster",
    "checkpoints": "the checkpoints of a run, every file verified",
    "consolidate": "a checkpoint's parameters as safetensors, for inference",
    "generate": "continue a prompt with a trained run",
    "report": "runs side by side: losses with intervals, gaps, curves, as a page and a table",
    "power": "seeds, tokens and hours that a gap takes, from a pilot's runs",
    "study": "a claim, its runs, and the rule that decides it: run, verdict",
    "attention-map": "what the heads of a trained run attend to, as a figure",
    "outliers": "outliers and sinks of a checkpoint over fixed tokens, layer by layer",
    "dashboard": "a saved wandb view that compares variants",
    "noise-floor": "a signal among noisy logits: standard against differential attention",
}

READ_RUNS = ("checkpoints", "consolidate", "generate", "attention-map", "outliers", "dashboard")
"""Commands with the argument plugins=[...]."""
COMPOSE = ("prepare", "count", "plan", "report", "power", "study")
"""Commands with overrides, plugins=[...] among them, and --config-dir."""


def usage() -> str:
    """Return the list of subcommands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}} {what}" for name, what in COMMANDS.items()]
    brought = (
        "plugins=[MODULE,...] imports variants, data sources and metrics of your own, in every\n"
        "command that composes a config or opens a run; --config-dir DIR searches YAMLs of your own"
    )
    return "\n".join(
        ["usage: diffllm COMMAND ...; diffllm COMMAND --help", "", *lines, "", brought]
    )


def bring(words: list[str], composes: bool) -> list[str]:
    """Import the plugins that a command line names, before a tool that reads what they register.

    Returns the words without directories of YAMLs, which a command that `composes` takes.
    """
    if not any(word.lstrip("+").startswith(("plugins=", "--config-dir", "-cd")) for word in words):
        return words  # and nothing heavy is imported
    from diffllm.config import compose, plugins

    directories, others = plugins.take_directories(words) if composes else ([], words)
    compose.bring(others, directories)
    return others


@contextmanager
def suppressed_at_end_of_reading() -> Iterator[None]:
    """A context that ends quietly where what reads our output, such as `head`, has had enough."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand, whose exit code is returned; 2 for what a user can mend."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    try:
        if args[0] not in COMMANDS:
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UserError(f"unknown command {args[0]!r}; {hint}choose from {', '.join(COMMANDS)}")
        words = bring(args[1:], args[0] in COMPOSE) if args[0] in READ_RUNS + COMPOSE else args[1:]
        tool = importlib.import_module(f"diffllm.tools.{args[0].replace('-', '_')}")
        with suppressed_at_end_of_reading() if args[0] != "train" else nullcontext():
            return tool.main(words) or 0
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
