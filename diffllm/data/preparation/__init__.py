"""From text to token shards, in processes that each write their own."""
