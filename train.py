"""Train a decoder: `python train.py [overrides]`, under torchrun too, `-m` for a sweep."""

import os
import sys

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from diffllm.config import config_directory, load_config
from diffllm.errors import UserError


def main() -> int:
    args = get_args_parser().parse_args()
    hydra_only = (args.help, args.hydra_help, args.info, args.cfg, args.shell_completion)
    if any(hydra_only):
        run_hydra()
        return 0
    try:
        if args.multirun:
            from diffllm.sweep import check_sweep

            return sweep(args.overrides)
        from diffllm.run import run

        run(load_config(args.overrides))
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
