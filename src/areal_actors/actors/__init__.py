"""The actors. Each is the single owner of its state and a thin layer over the pure packages.

Actors know messages and never import one another. Import each from its module; ``trainer`` is the only one that loads
torch.
"""
