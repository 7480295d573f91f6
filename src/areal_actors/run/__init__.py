"""The composition root: the one place that knows everybody.

``inference`` opens what answers agents, ``learning`` what learns from them: in ``training`` from a dataset, in
``serving`` from agents elsewhere. ``job`` loads what they need, ``signals`` ends it when a person asks. ``entry`` and
``host`` stand before services that are processes of their own: they need no model, so that nothing is imported here
before somebody asks for it.
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
"""Where each name lives; type checkers read the same above."""

# Hidden from type checkers, for which a module with ``__getattr__`` has every attribute, misspelt ones included.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import what ``name`` stands for, once."""
        from importlib import import_module

        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value
