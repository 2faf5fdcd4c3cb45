"""Statistics over seeds and documents: intervals, tests of gaps between variants, and power."""
