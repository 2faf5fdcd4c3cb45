"""Train a decoder: `python train.py [overrides]` is `diffllm train [overrides]`."""

import sys

from diffllm.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
