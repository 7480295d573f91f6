"""Training: advantages, objectives, packed forward passes, AdamW, checkpoints and exports. Knows no actor and no engine."""
