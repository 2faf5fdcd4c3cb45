"""Sweeps, `train.py -m`: each combination of swept values has a separate process."""
