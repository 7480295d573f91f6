"""Training: advantages, objectives, packed forward passes, AdamW, checkpoints and exports.

Imports no actor and no engine.

Nothing is re-exported: ``training.config`` is imported by programs that never load torch.
"""
