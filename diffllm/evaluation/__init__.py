"""Evaluations of checkpoints: generated tasks, losses and statistics, and stored results."""
