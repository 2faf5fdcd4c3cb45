"""Statistics over seeds and documents: confidence intervals, tests of gaps, and power."""
