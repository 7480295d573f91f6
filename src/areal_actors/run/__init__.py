"""The composition root: the only package that knows every actor and wires them together.

A run is put together in one way, whether it is one process or many::

    training, serving ──▶ plan ──▶ controller ──▶ openers ──▶ inference (engine, sessions, proxy), training, rollouts
                                       └────────▶ control_plane, supervise ──▶ worker ──▶ openers

``training`` runs over a dataset and ``serving`` takes sessions from external agents. ``openers`` has one opener for
each role, and the controller calls it in its own process for each role that the plan places in no worker.
``inference.open_inference`` opens the actors that answer agents, without a run. The modules are imported on
first access: most need torch, and some commands do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_actors.dashboard import RunSummary
    from areal_actors.run.inference import EmbeddedSession, Inference, open_inference
    from areal_actors.run.serving import Server, serve
    from areal_actors.run.training import Trainer, TrainingRun, train

__all__ = [
    "EmbeddedSession",
    "Inference",
    "RunSummary",
    "Server",
    "Trainer",
    "TrainingRun",
    "open_inference",
    "serve",
    "train",
]

_MODULES = {
    "areal_actors.run.inference": ("EmbeddedSession", "Inference", "open_inference"),
    "areal_actors.run.serving": ("Server", "serve"),
    "areal_actors.run.training": ("RunSummary", "Trainer", "TrainingRun", "train"),
}
"""The module that defines each lazily imported name; keep it equal to the ``TYPE_CHECKING`` block above."""

# Hidden from type checkers, for which a module with ``__getattr__`` has every attribute, misspelt ones included.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import ``name`` from its module on first access and cache it in this package."""
        from importlib import import_module

        found = next((module for module, names in _MODULES.items() if name in names), None)
        if found is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(found), name)
        globals()[name] = value
        return value
