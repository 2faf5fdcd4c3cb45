"""Comparison of runs: sweeps, reports and studies."""
