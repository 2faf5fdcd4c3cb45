"""Sweeps (`train.py -m`): one run, in a separate process, per combination of swept values."""
