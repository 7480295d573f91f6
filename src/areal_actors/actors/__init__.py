"""The actors: each the one owner of some facts, thin over the pure rooms. They know messages, never one another.

Import them from their modules; ``trainer`` alone loads torch.
"""
