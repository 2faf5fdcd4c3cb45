"""Metrics of a run and their destinations: metrics.jsonl, the terminal, wandb, TensorBoard."""
