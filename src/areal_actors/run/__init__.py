"""The composition root: the only package that knows every actor and wires them together.

``inference`` opens the actors that answer agents and ``learning`` those that train on their sessions; ``training`` runs
over a dataset and ``serving`` takes sessions from external agents. ``job`` loads what a run needs, and ``signals``
stops a run on SIGINT or SIGTERM. ``entry`` and ``host`` stand in front of services that run as separate processes. They
need no model, so this package imports its modules lazily, on first attribute access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_actors.run.inference import EmbeddedSession, Inference, open_inference
    from areal_actors.run.serving import Server, serve
    from areal_actors.run.training import RunSummary, Trainer, train

__all__ = ["EmbeddedSession", "Inference", "RunSummary", "Server", "Trainer", "open_inference", "serve", "train"]

_HOMES = {
    "areal_actors.run.inference": ("EmbeddedSession", "Inference", "open_inference"),
    "areal_actors.run.serving": ("Server", "serve"),
    "areal_actors.run.training": ("RunSummary", "Trainer", "train"),
}
"""The module that defines each lazily imported name; keep it equal to the ``TYPE_CHECKING`` block above."""

# Hidden from type checkers, for which a module with ``__getattr__`` has every attribute, misspelt ones included.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import ``name`` from its module on first access and cache it in this package."""
        from importlib import import_module

        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value
