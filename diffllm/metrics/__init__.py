"""Metrics of a run, and their destinations: metrics.jsonl, terminal, wandb and TensorBoard."""
