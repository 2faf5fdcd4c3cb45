"""Planning: memory, time and traffic of a training run, computed without a cluster."""
