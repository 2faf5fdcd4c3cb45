"""Studies: claims, the runs that decide them, and verdicts by registered rules."""
