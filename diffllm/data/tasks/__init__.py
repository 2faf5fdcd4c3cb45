"""Generated tasks: examples with one right answer, at settings of difficulty.

Importing this registers those that come with the package.
"""

from diffllm.data.tasks import generators

VERSION = 6
"""Changed whenever examples change, so that results of older examples are not reused."""

__all__ = ["VERSION", "generators"]
