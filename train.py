"""Train a decoder: `python train.py [overrides]` is `diffllm train [overrides]`."""

import sys

from diffllm.tools.train import main

if __name__ == "__main__":
    sys.exit(main())
