"""Runs on disk side by side: one self-contained page and a table."""
