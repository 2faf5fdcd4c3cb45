"""Checkpoints: written in the background, visible only when complete."""
