"""The `diffllm` console script: one module a subcommand."""

import difflib
import importlib
import sys
from contextlib import nullcontext
from keyword import iskeyword

from diffllm.core.errors import UserError
from diffllm.core.printing import echo
from diffllm.metrics.streams import never_fail, open_closed_descriptors, result

COMMANDS = {
    "train": "train a decoder, or with -m a sweep of them; the same as python train.py",
    "prepare": "make a corpus's tokenizer and token shards ahead of a run",
    "count": "parameters, FLOPs and KV cache of a model",
    "plan": "memory, communication and time of a run on a cluster, without the cluster",
    "checkpoints": "the checkpoints of a run, every file verified",
    "consolidate": "a checkpoint's parameters as safetensors, for inference",
    "export": "a checkpoint as a model of the transformers library",
    "import": "a model of the transformers library as a run, as it is or converted to DIFF V2",
    "generate": "continue a prompt with a trained run",
    "evaluate": "retrieval and in-context tasks on the checkpoints of runs",
    "report": "runs side by side: losses with intervals, gaps, curves, as a page and a table",
    "power": "seeds, tokens and hours that a gap takes, from a pilot's runs",
    "study": "a claim, its runs, and the rule that decides it: run, verdict",
    "attention-map": "what the heads of a trained run attend to, as a figure",
    "outliers": "outliers and sinks of a checkpoint over fixed tokens, layer by layer",
    "dashboard": "a saved wandb view that compares variants",
    "noise-floor": "a signal among noisy logits: standard against differential attention",
}

READ_RUNS = (
    "checkpoints",
    "consolidate",
    "export",
    "import",
    "evaluate",
    "generate",
    "attention-map",
    "outliers",
    "dashboard",
)
"""Commands with the argument plugins=[...]."""
COMPOSE = ("prepare", "count", "plan", "report", "power", "study")
"""Commands with overrides, plugins=[...] among them, and --config-dir."""

RUN = ("train", "prepare")
"""Commands whose result is not their output, as `study run` is: there nothing said ends them."""


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


def module_of(command: str) -> str:
    """Return the name of a subcommand's module, which no Python keyword can be."""
    name = command.replace("-", "_")
    return f"{name}_" if iskeyword(name) else name


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


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand, whose exit code is returned; 2 for what a user can mend."""
    open_closed_descriptors()  # before the imports that open files
    args = sys.argv[1:] if argv is None else argv
    never_fail()
    try:
        if not args or args[0] in ("-h", "--help"):
            with result():
                echo(usage())
            return 0 if args else 2
        if args[0] not in COMMANDS:
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UserError(f"unknown command {args[0]!r}; {hint}choose from {', '.join(COMMANDS)}")
        words = bring(args[1:], args[0] in COMPOSE) if args[0] in READ_RUNS + COMPOSE else args[1:]
        tool = importlib.import_module(f"diffllm.cli.{module_of(args[0])}")
        runs = args[0] in RUN or args[:2] == ["study", "run"]
        with nullcontext() if runs else result():
            return tool.main(words) or 0
        return 0
    except UserError as error:
        echo(f"error: {error}", file=sys.stderr)
        return 2
