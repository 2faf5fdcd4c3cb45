"""Studies: what a comparison takes, and a claim with the runs and the rule that decide it."""
