"""Evaluate checkpoints on tasks and held-out text, and store the results."""

TOKENS = 16384
"""Default number of tokens of a pass over the first held-out sequences."""
