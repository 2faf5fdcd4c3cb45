"""Sweeps, `train.py -m`: every combination of the swept values is a run in a process of its own."""
