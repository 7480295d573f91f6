"""Problems: their sources, and the order in which a run uses them."""

from __future__ import annotations

from areal_actors.datasets.difficulty import DifficultyConfig, ProblemPools
from areal_actors.datasets.harbor import TaskDirectory, find_task_directories, load_task, resolve_variables
from areal_actors.datasets.problems import Problems, find_overlap
from areal_actors.datasets.sources import (
    DataPath,
    DatasetConfig,
    HubDataset,
    ProblemsReference,
    load_problems,
    read_json_lines,
)
from areal_actors.datasets.tasksets import PluginReference, VerifiersPlugin

__all__ = [
    "DataPath",
    "DatasetConfig",
    "DifficultyConfig",
    "HubDataset",
    "PluginReference",
    "ProblemPools",
    "Problems",
    "ProblemsReference",
    "TaskDirectory",
    "VerifiersPlugin",
    "find_overlap",
    "find_task_directories",
    "load_problems",
    "load_task",
    "read_json_lines",
    "resolve_variables",
]
