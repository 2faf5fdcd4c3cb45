"""Runs, arms and gaps of reports and studies, and pages that describe them."""
