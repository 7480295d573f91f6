"""Offline bug fixing: tasks from installed Python packages, whose own tests reward the repair."""

from __future__ import annotations

from areal_actors.bugs.agent import FixFunction
from areal_actors.bugs.generation import Bug, BugConfig, Counts, open_bugs
from areal_actors.bugs.sources import TestedModule, find_modules
from areal_actors.bugs.tasks import Level, create_messages, read_bug, write_task, write_tasks

__all__ = [
    "Bug",
    "BugConfig",
    "Counts",
    "FixFunction",
    "Level",
    "TestedModule",
    "create_messages",
    "find_modules",
    "open_bugs",
    "read_bug",
    "write_task",
    "write_tasks",
]
