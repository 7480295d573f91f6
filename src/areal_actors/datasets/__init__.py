"""Problems: their sources, and the order in which a run uses them."""

from __future__ import annotations

from areal_actors.datasets.difficulty import DifficultyConfig as DifficultyConfig
from areal_actors.datasets.difficulty import ProblemPools as ProblemPools
from areal_actors.datasets.problems import Problems as Problems
from areal_actors.datasets.problems import find_overlap as find_overlap
from areal_actors.datasets.sources import DataPath as DataPath
from areal_actors.datasets.sources import DatasetConfig as DatasetConfig
from areal_actors.datasets.sources import DatasetPlugin as DatasetPlugin
from areal_actors.datasets.sources import HubDataset as HubDataset
from areal_actors.datasets.sources import ProblemsReference as ProblemsReference
from areal_actors.datasets.sources import Rows as Rows
from areal_actors.datasets.sources import find_shortage as find_shortage
from areal_actors.datasets.sources import load_problems as load_problems
from areal_actors.datasets.sources import read_json_lines as read_json_lines
from areal_actors.datasets.values import plain_row as plain_row
