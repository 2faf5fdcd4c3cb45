"""Sweeps, `train.py -m`: each combination of the swept values is a run in a separate process."""
