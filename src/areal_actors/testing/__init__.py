"""Public fakes, strategies and contract checks for those who test against this library."""
