"""diffllm train [overrides]: train a decoder, alone or under torchrun; -m for a sweep."""

import io
import os
import sys
import time
import warnings
from argparse import Namespace
from contextlib import redirect_stdout, suppress
from typing import NoReturn

from diffllm.distributed.launcher import end_with_torchrun, environment, set_variables
from diffllm.metrics.streams import open_closed_descriptors

open_closed_descriptors()  # before the imports that open files
end_with_torchrun()  # before the imports that take seconds
set_variables()
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")

import hydra  # noqa: E402
from hydra._internal.utils import get_args_parser  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from diffllm.config import load_config  # noqa: E402
from diffllm.config.compose import composed  # noqa: E402
from diffllm.config.origin import with_origin  # noqa: E402
from diffllm.config.plugins import (  # noqa: E402
    config_directory,
    load_plugins,
    take_directories,
)
from diffllm.core.errors import AgreedError, ConfigError, LaunchError, UserError  # noqa: E402
from diffllm.core.printing import echo  # noqa: E402
from diffllm.metrics.streams import never_fail, result  # noqa: E402

RANK_0_S = 30.0
"""Seconds for rank 0 to print an error of every rank."""


@hydra.main(version_base="1.3", config_path=str(config_directory()), config_name="train")
def hydra_main(_: DictConfig) -> None:
    """Serve Hydra's own flags (--cfg, --info); runs and sweeps do not come here."""


def hydra_arguments(argv: list[str]) -> tuple[Namespace, bool]:
    """The command line, and whether it only asks for something to be shown; raises ConfigError."""
    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    args = parser.parse_intermixed_args(argv)  # -m may stand behind overrides
    shown = [
        name for name in ("help", "hydra_help", "info", "cfg", "shell_completion")
        if getattr(args, name)
    ]  # fmt: skip
    other = ["config_name", "config_path", "config_dir", "experimental_rerun"]
    other += ["multirun", *shown[1:]] if shown else []
    other += ["package", "resolve"] if not args.cfg else []
    for name in other:
        if getattr(args, name):
            beside = f" beside --{shown[0]}" if shown else ""
            raise ConfigError(
                f"--{name} has no meaning here{beside}; the configuration is conf/train.yaml and "
                "key=value overrides"
            )
    return args, bool(shown)


def refuse(message: str) -> NoReturn:
    """In place of argparse's usage lines."""
    raise ConfigError(message)


def train_command(argv: list[str] | None = None) -> int:
    """Train, sweep or show; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    never_fail()
    try:
        config_dirs, argv = take_directories(argv)
        args, shows = hydra_arguments(argv)
        load_plugins(args.overrides, config_dirs)
        if args.help:
            from diffllm.config.help import help_text

            with result():
                echo(help_text(args.overrides))
        elif shows:
            # Here, for of what is wrong Hydra would show a traceback.
            _, words = composed(with_origin(args.overrides))
            sys.argv[1:] = [word for word in argv if word not in args.overrides] + words
            text = io.StringIO()
            try:
                with redirect_stdout(text):  # Hydra would show a traceback of what fails here
                    hydra_main()
            finally:
                with result():
                    echo(text.getvalue(), end="")
        elif args.multirun:
            from diffllm.compare.sweep.command import run_sweep

            return run_sweep(args.overrides, config_dirs)
        else:
            from diffllm.cli.run import run_and_report

            run_and_report(load_config(args.overrides))
    except UserError as error:
        rank = 0
        with suppress(LaunchError):  # variables that make no sense
            rank = environment()[0]
        if rank == 0:
            echo(f"error: {error}", file=sys.stderr)
        elif not isinstance(error, (AgreedError, ConfigError)):  # those are every rank's
            echo(f"error: rank {rank}: {error}", file=sys.stderr)
        elif "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(RANK_0_S)  # torchrun stops all ranks when the first one ends
        return 2
    return 0
