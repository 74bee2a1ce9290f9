"""vault: incremental checkpoints of content-addressed chunks."""
