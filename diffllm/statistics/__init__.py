"""Statistics over seeds and documents: intervals, tests of gaps, power. Numbers only, no runs."""
