"""Processes, meshes and sharding, which wrap a model from outside."""
