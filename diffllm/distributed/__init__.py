"""Processes, device meshes and sharding. Model code does not import this package."""
