"""Runs, arms and gaps: what reports and studies compare, and how pages describe it."""
