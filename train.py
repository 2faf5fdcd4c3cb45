"""Train a decoder: `python train.py [overrides]` is `diffllm train [overrides]`."""

import sys

from diffllm.cli.train import train_command as main

if __name__ == "__main__":
    sys.exit(main())
