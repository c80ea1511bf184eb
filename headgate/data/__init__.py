"""From text to token shards, and from token shards to batches."""
