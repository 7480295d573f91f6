"""The command line: ``areal-actors train``, ``serve``, ``export``, ``models``, ``report``, ``keys``, ``slurm``.

Everything heavy is imported by the command that needs it, so that ``--help`` is there at once. What training is, is
told in ``run``; here errors become one clear message and an exit code (``explaining``). A family of commands has a
module of its own; ``commands`` puts them together.
"""

from __future__ import annotations

from areal_actors.cli.commands import cli, main

__all__ = ["cli", "main"]
