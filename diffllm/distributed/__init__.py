"""Processes, device meshes and sharding; model code does not import this package."""
