"""Train a run, from a typed config to a summary; `run.py` is the entry point."""
