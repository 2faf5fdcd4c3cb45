"""From text to token shards, in processes and on nodes that each write their own."""
