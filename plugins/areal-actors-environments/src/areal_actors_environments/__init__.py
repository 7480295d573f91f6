"""Environments for agents: verifiers, OpenEnv, task directories in Harbor's format, function calling as in BFCL."""
