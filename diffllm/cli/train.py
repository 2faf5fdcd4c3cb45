"""diffllm train [overrides]: train a decoder in one process or under torchrun; -m for a sweep."""

import warnings
from argparse import ArgumentParser
from typing import Any, NoReturn

from diffllm.distributed.launcher import end_with_torchrun, own_rank, stopped_status

end_with_torchrun()  # before the imports that take seconds
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")

from omegaconf import OmegaConf  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402

from diffllm.cli.arguments import take_json  # noqa: E402
from diffllm.config import load_config  # noqa: E402
from diffllm.config.origin import compose_with_origin  # noqa: E402
from diffllm.config.overrides import flag_suggestion, one_line  # noqa: E402
from diffllm.config.plugins import load_plugins, take_directories  # noqa: E402
from diffllm.core.errors import ConfigError  # noqa: E402
from diffllm.core.printing import echo, echo_json  # noqa: E402
from diffllm.core.standard_streams import messages_on_stderr, result  # noqa: E402


class Parser(ArgumentParser):
    """Parser of the flags and overrides of `diffllm train`; raises ConfigError for a wrong flag."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        modes = self.add_mutually_exclusive_group()
        modes.add_argument("--help", "-h", action="store_true")
        modes.add_argument("--multirun", "-m", action="store_true")
        modes.add_argument("--cfg", choices=["job"])
        self.add_argument("--resolve", action="store_true")
        self.add_argument("overrides", nargs="*")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def train_command(argv: list[str]) -> int:
    as_json, argv = take_json(argv)
    config_dirs, argv = take_directories(argv)
    args, unknown = Parser().parse_known_intermixed_args(argv)  # -m may come after overrides
    if unknown:
        flags = "; the flags are --help, -m, --json, --cfg job, --resolve and --config-dir DIR"
        raise ConfigError(f"unknown argument {unknown[0]!r}{flag_suggestion(unknown[0]) or flags}")
    if args.resolve and not args.cfg:
        raise ConfigError("--resolve is only allowed together with --cfg job")
    load_plugins(args.overrides, config_dirs)
    if args.help:
        from diffllm.config.help import help_text

        with result():
            echo(help_text(args.overrides))
    elif args.cfg:
        cfg = compose_with_origin(args.overrides)
        try:
            text = OmegaConf.to_yaml(cfg, resolve=args.resolve)
        except OmegaConfBaseException as error:
            raise ConfigError(one_line(error)) from error
        with result():
            if as_json:
                echo_json(OmegaConf.to_container(cfg, resolve=args.resolve, enum_to_str=True))
            else:
                echo(text, end="")
    else:
        with messages_on_stderr(as_json):
            if args.multirun:
                from diffllm.compare.sweep.command import run_sweep

                status, content = run_sweep(args.overrides, config_dirs)
            else:
                status, content = train_run(args.overrides)
        # All ranks get the content, but the JSON value must be printed once.
        if as_json and own_rank() == 0:
            with result():
                echo_json(content)
        return status
    return 0


def train_run(overrides: list[str]) -> tuple[int, dict[str, Any]]:
    """Train one run; return the exit status and the values that --json prints."""
    from diffllm.cli.run import run_and_report
    from diffllm.distributed.stop import REQUEUE

    outcome = run_and_report(load_config(overrides))
    stopped = outcome.stopped
    content = {
        "run": str(outcome.path) if outcome.path else None,
        "signal": stopped.name if stopped else None,
        **(outcome.summary or {}),
    }
    # A scheduler requeues the run after its own signals and must not see a failure.
    if stopped and stopped not in REQUEUE:
        return stopped_status(stopped), content
    return 0, content
