"""Problems: where they come from, and which one stands at which position of a run."""

from __future__ import annotations

from areal_actors.datasets.problems import Problems, find_overlap
from areal_actors.datasets.sources import DatasetConfig, load_problems

__all__ = ["DatasetConfig", "Problems", "find_overlap", "load_problems"]
