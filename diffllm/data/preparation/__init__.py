"""Encode text to token shards, in parallel processes that write separate shards."""
