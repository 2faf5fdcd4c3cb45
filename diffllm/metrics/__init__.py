"""The numbers that a run reports, and where to: metrics.jsonl, the terminal, wandb."""
