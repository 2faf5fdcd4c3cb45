"""Studies: what a pilot says of the seeds that a claim takes."""
