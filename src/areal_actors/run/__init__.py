"""The composition root: the one place that knows everybody.

``inference`` opens what answers agents, ``training`` what learns from them, ``signals`` ends it when a person asks.
"""

from __future__ import annotations

from areal_actors.run.inference import EmbeddedSession, Inference, open_inference
from areal_actors.run.training import RunSummary, Trainer, train

__all__ = ["EmbeddedSession", "Inference", "RunSummary", "Trainer", "open_inference", "train"]
