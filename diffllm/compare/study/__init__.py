"""Studies: plan the runs that test a claim, and compute a verdict by preregistered rules."""
