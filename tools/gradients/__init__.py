"""The table of ``docs/discussion/gradients.md``: how far estimators are from the policy gradient."""
