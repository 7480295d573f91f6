"""The service around runs: users with keys and quotas, the services of a host, and the entry point to several."""
