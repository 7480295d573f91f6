"""A Tinker-compatible training server: unmodified ``tinker`` clients create adapters, train them, and sample."""
