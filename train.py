"""Train a decoder: `python train.py [overrides]`, alone or under torchrun; `-m` for a sweep."""

import os
import sys
import warnings
from argparse import Namespace
from typing import NoReturn

from diffllm.distributed.launcher import end_with_torchrun, environment

end_with_torchrun()  # before the imports that take seconds
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
# MKL otherwise picks one of two code paths for small products, process by process, and a continued
# run would differ from an uninterrupted one in the last bits. Costs about 5% on a CPU.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
# A rank that is gone is named by ours; torch would add a C++ stack trace for every socket.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import hydra  # noqa: E402
from hydra._internal.utils import get_args_parser  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from diffllm.config import load_config  # noqa: E402
from diffllm.config.compose import composed, config_directory  # noqa: E402
from diffllm.errors import AgreedError, ConfigError, LaunchError, UserError  # noqa: E402


@hydra.main(version_base="1.3", config_path=str(config_directory()), config_name="train")
def hydra_main(_: DictConfig) -> None:
    """Serve Hydra's own flags (--cfg, --info); runs and sweeps do not come here."""


def arguments() -> tuple[Namespace, bool]:
    """The command line, and whether it only asks for something to be shown; raises ConfigError."""
    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    args = parser.parse_args()
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


def main() -> int:
    try:
        args, shows = arguments()
        if args.help:
            from diffllm.config.help import help_text

            print(help_text(args.overrides))
        elif shows:
            _, words = composed(args.overrides)  # of what is wrong, Hydra would show a traceback
            sys.argv = [word for word in sys.argv if word not in args.overrides] + words
            hydra_main()
        elif args.multirun:
            from diffllm.sweep.command import sweep

            return sweep(args.overrides, os.path.abspath(__file__))
        else:
            from diffllm.run.start import run

            run(load_config(args.overrides))
    except UserError as error:
        rank = reported_rank()
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        elif not isinstance(error, (AgreedError, ConfigError)):  # those are every rank's
            print(f"error: rank {rank}: {error}", file=sys.stderr)
        return 2
    return 0


def reported_rank() -> int:
    """This process's rank, or 0 where its variables make no sense."""
    try:
        return environment()[0]
    except LaunchError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
