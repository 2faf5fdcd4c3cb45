"""Evaluate checkpoints on tasks and held-out text, and store the results."""
