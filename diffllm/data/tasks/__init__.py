"""Generated tasks: examples with one right answer, at several levels of difficulty.

Importing this package registers the built-in tasks.
"""

from diffllm.data.tasks import generators, icl

TASKS_VERSION = 6
"""Changed whenever examples change, so that results of older examples are not reused."""

__all__ = ["generators", "icl"]
