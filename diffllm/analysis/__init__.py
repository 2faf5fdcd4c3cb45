"""Figures of the mechanism itself, outside of any training."""
