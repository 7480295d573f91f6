"""Programs of contributors: figures of the source, pages written from runs, nightly attacks. None is in a wheel."""
