"""The composition root: the one place that knows everybody.

``inference`` opens what answers agents, ``learning`` what learns from them: in ``training`` from a dataset, in
``serving`` from agents elsewhere. ``job`` loads what they need, ``signals`` ends it when a person asks.
"""

from __future__ import annotations

from areal_actors.run.inference import EmbeddedSession, Inference, open_inference
from areal_actors.run.serving import Server, serve
from areal_actors.run.training import RunSummary, Trainer, train

__all__ = ["EmbeddedSession", "Inference", "RunSummary", "Server", "Trainer", "open_inference", "serve", "train"]
