"""The command line: ``areal-actors train``, ``serve``, ``export``, ``models``, ``report``, ``keys``, ``slurm``.

Heavy modules are imported by the command that needs them, so that ``--help`` is fast. ``run`` implements training; here
errors are turned into one clear message and an exit code (``explaining``). Each family of commands has a module;
``commands`` combines them.
"""

from __future__ import annotations

from areal_actors.cli.commands import cli, main

__all__ = ["cli", "main"]
