"""Planning: what a training run would need of a cluster, found without one."""
