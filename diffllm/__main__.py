"""Run the `diffllm` commands as `python -m diffllm COMMAND ...`."""

import sys

from diffllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
