"""Training: from prepared shards to a run folder, and what is measured along the way."""
