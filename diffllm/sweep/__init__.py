"""`train.py -m`: every combination of the swept values is a run of its own, in its own process."""
