"""What tests of this library, and of code that uses it, may lean on: strategies, fakes and contract checks."""
