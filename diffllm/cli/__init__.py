"""Entry point of the `diffllm` commands: `diffllm train` calls `train_command` in train.py, etc."""

import importlib
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from types import FrameType

from diffllm.core import VERSION
from diffllm.core.errors import AgreedError, ConfigError, UserError, choose_from, hint
from diffllm.core.printing import echo
from diffllm.core.standard_streams import never_fail, open_closed_descriptors, result
from diffllm.distributed.launcher import own_rank, report_signal, set_variables

COMMANDS = {
    "train": "train a decoder, or a sweep with -m; the same as python train.py",
    "prepare": "make the tokenizer and the token shards of a corpus before a run",
    "count": "count parameters, FLOPs and KV cache of a model",
    "plan": "estimate memory, communication and time of a run on a cluster",
    "events": "list spikes, skipped updates, restarts and stalls of a run, with their text",
    "checkpoints": "list the checkpoints of a run and verify every file",
    "consolidate": "write a checkpoint's parameters as safetensors, for inference",
    "export": "write a checkpoint as a model of the transformers library",
    "import": "make a run from a transformers model, unchanged or converted to DIFF V2",
    "generate": "continue a prompt with a trained run",
    "evaluate": "run retrieval and in-context tasks on checkpoints",
    "report": "compare runs: losses with intervals, gaps and curves, as a page and a table",
    "dashboard": "make a wandb workspace and a report of a sweep, a study or a project",
    "wandb": "write runs to wandb from their directories: disabled runs, moved servers, repair",
    "power": "estimate the seeds, tokens and hours to find a gap, from pilot runs",
    "study": "test a claim with a rule stated in advance: study run, study verdict",
    "timing": "measure step times of the arms of a study or sweep, in turns",
    "attention-map": "draw the attention of the heads of a trained run",
    "outliers": "measure outliers and attention sinks of a checkpoint, per layer",
}
MODULES = {
    "consolidate": "convert", "export": "convert", "import": "convert", "power": "study",
}  # fmt: skip
COMPOSE = ("prepare", "count", "plan", "report", "dashboard", "power", "study", "timing")
INTERRUPTED = 128 + signal.SIGINT
"""The exit code after Ctrl-C."""
RANK_0_S = 30.0
"""Seconds that other ranks wait while rank 0 prints a shared error."""


def usage() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}} {text}" for name, text in COMMANDS.items())
    return f"""\
usage: diffllm COMMAND ...; diffllm COMMAND --help; diffllm --version

{commands}

--json or json=true prints one JSON value on stdout, for all commands; messages go to stderr
plugins=[MODULE,...] imports your variants, data sources and metrics, for all commands
that compose a config or open a run; --config-dir DIR adds a directory of your YAML files"""


def module_of_command(name: str) -> str:
    return f"diffllm.cli.{MODULES.get(name, name).replace('-', '_')}"


def with_plugins(name: str, words: list[str]) -> list[str]:
    """Import the plugin modules that the word plugins=[...] in `words` lists.

    `words` are the arguments of the command `name`. If `name` is in COMPOSE and `words` contains
    --config-dir DIR, also register DIR as a directory of YAML files, and return `words` without
    --config-dir DIR. Otherwise, return `words` unchanged. "train" imports its plugins itself.
    """
    options = ("plugins=", "--config-dir", "-cd")
    has_option = any(word.lstrip("+").startswith(options) for word in words)
    if name == "train" or not has_option:
        return words  # avoids the slow imports below
    from diffllm.config.plugins import load_plugins, take_directories

    if name not in COMPOSE:
        load_plugins(words, [])
        return words
    directories, words = take_directories(words)
    load_plugins(words, directories)
    return words


def run_command(name: str, words: list[str]) -> int:
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}{choose_from(name, list(COMMANDS))}")
    set_variables()  # before the first import of torch
    try:
        # Plugins register variants and data sources before a command composes a config.
        words = with_plugins(name, words)
        # Only the module of this command: others would import libraries that take seconds.
        module = importlib.import_module(module_of_command(name))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "diffllm":
            raise
        lacks = f"{sys.executable} has no module {error.name}"
        raise UserError(f"{lacks}; activate the environment: source .venv/bin/activate") from error
    command = getattr(module, f"{name.replace('-', '_')}_command")
    # `train` installs handlers later. From here on, other commands can clean up after Ctrl-C.
    if name != "train" and signal.getsignal(signal.SIGINT) is exit_at_once:
        text = "interrupted"
        if name == "prepare":
            text += "; the same command resumes"
        signal.signal(signal.SIGINT, partial(interrupt, text))
    # Commands that only print fail if the output cannot be written.
    is_study_run = name == "study" and words[:1] == ["run"]
    makes_files = is_study_run or name in ("train", "prepare", "timing")
    with nullcontext() if makes_files else result():
        return command(words) or 0
    return 0


def exit_at_once(number: int, frame: FrameType | None) -> None:
    report_signal("interrupted")
    # An import could catch or wrap a KeyboardInterrupt.
    os._exit(INTERRUPTED)


def interrupt(text: str, number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: print `text`, raise KeyboardInterrupt. A second Ctrl-C ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    report_signal(text)
    raise KeyboardInterrupt


def report_error(error: UserError, hint_text: str) -> None:
    """Print `error` on stderr; on rank 0, add `hint_text`.

    Ranks other than 0 print nothing if `error` is of a type that all ranks raise together.
    """
    rank = own_rank()
    if rank == 0:
        echo(f"error: {error}{hint_text}", file=sys.stderr)
    elif not isinstance(error, (AgreedError, ConfigError)):  # all ranks raise such errors
        echo(f"error: rank {rank}: {error}", file=sys.stderr)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(RANK_0_S)  # torchrun stops all ranks when the first one ends


def main(argv: list[str] | None = None, command: str | None = None) -> int:
    """Run one command and return the exit code: 2 after a UserError, 130 after Ctrl-C.

    `argv` defaults to sys.argv[1:], and `command` to the first word of `argv`.
    """
    open_closed_descriptors()  # before the imports that open files
    args = list(sys.argv[1:] if argv is None else argv)
    if command:
        args.insert(0, command)
    never_fail()
    former_handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        former_handler = None  # another thread cannot set handlers
    # A caller's own handler stays in place.
    if former_handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_at_once)
    try:
        if not args or args[0] in ("-h", "--help", "--version"):
            with result():
                echo(f"diffllm {VERSION}" if args[:1] == ["--version"] else usage())
            return 0 if args else 2
        return run_command(args[0], args[1:])
    except UserError as error:
        report_error(error, hint(args[1:], str(error)))
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if former_handler is signal.default_int_handler:
            # At the exit of a process, the default handler of Python would print a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL if argv is None else former_handler)
