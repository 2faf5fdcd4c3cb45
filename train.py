"""Train a decoder: `python train.py [overrides]` is `diffllm train [overrides]`."""

import sys
from functools import partial

from diffllm import cli

main = partial(cli.main, command="train")

if __name__ == "__main__":
    sys.exit(main())
