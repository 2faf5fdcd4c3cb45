"""What a run reports: metrics.jsonl, the terminal, wandb."""
