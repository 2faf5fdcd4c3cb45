"""`python -m diffllm COMMAND ...` is `diffllm COMMAND ...`."""

import sys

from diffllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
