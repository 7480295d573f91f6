"""``python -m areal_actors``, and the script ``areal-actors``: the command line, implemented in ``cli``."""

from __future__ import annotations

from areal_actors.cli import cli, main

__all__ = ["cli", "main"]

if __name__ == "__main__":
    main()
