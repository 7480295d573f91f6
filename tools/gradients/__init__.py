"""The table of ``docs/results/gradients.md``: how far estimators are from the policy gradient."""
