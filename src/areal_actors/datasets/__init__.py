"""Problems: their sources, and the order in which a run uses them."""

from __future__ import annotations

from areal_actors.datasets.difficulty import DifficultyConfig, ProblemPools
from areal_actors.datasets.problems import Problems, find_overlap
from areal_actors.datasets.sources import (
    DataPath,
    DatasetConfig,
    DatasetPlugin,
    HubDataset,
    ProblemsReference,
    Rows,
    load_problems,
    read_json_lines,
)
from areal_actors.datasets.values import plain_row

__all__ = [
    "DataPath",
    "DatasetConfig",
    "DatasetPlugin",
    "DifficultyConfig",
    "HubDataset",
    "ProblemPools",
    "Problems",
    "ProblemsReference",
    "Rows",
    "find_overlap",
    "load_problems",
    "plain_row",
    "read_json_lines",
]
