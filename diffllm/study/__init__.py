"""Studies: a claim, the runs that decide it, and the rule, written down before the first step."""
