"""Training: from prepared shards to a run folder, and what is measured on the way."""
