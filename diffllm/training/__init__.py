"""A run, from a typed config to a summary; `start.py` is the way in."""
