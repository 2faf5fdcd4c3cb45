"""Budgets: costs of training that are equal in all arms."""

TOLERANCE = 0.03
"""Largest relative difference between the FLOPs or seconds of arms with equal budgets."""
