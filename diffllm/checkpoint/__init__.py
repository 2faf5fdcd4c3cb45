"""Checkpoints, written in the background and visible only when complete."""
