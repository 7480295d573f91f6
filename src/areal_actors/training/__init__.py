"""Training: advantages, objectives, packed forward passes, AdamW, checkpoints and exports. Knows no actor, no engine.

Nothing is re-exported: ``training.config`` is read by programs that never load torch.
"""
