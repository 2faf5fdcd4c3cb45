"""Runs against each other: sweeps, reports and studies."""
