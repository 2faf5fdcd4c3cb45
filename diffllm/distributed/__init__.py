"""Processes, meshes and sharding; the model code does not depend on them."""
