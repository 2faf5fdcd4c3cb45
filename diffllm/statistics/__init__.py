"""Statistics over seeds and documents: intervals, tests of gaps, families, power. Numbers only."""
