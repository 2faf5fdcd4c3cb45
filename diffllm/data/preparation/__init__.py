"""Encode text to token shards in parallel processes; each process writes separate shards."""
