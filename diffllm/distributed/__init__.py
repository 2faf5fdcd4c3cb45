"""Processes, meshes and sharding; wraps a model from outside."""
