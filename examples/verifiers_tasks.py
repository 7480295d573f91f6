"""Two tasksets of verifiers: the task of the tiny model, and the generators of reasoning-gym.

A package that exports a taskset in ``__all__`` is named by its id; a class in a file, by ``file.py:Class``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field


class DigitsConfig(vf.TasksetConfig):
    """Options of the taskset: another split has other prompts."""

    split: str = "train"
    size: int = 64


class DigitsTask(vf.Task[vf.TaskData]):
    """Write digits, and nothing else."""

    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        """Return the share of characters that are digits."""
        return sum(character.isdigit() for character in trace.last_reply) / max(len(trace.last_reply), 1)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        """Return the length of the answer."""
        return len(trace.last_reply)


class DigitsTaskset(vf.Taskset[DigitsTask, DigitsConfig]):
    """Prompts that differ by a number."""

    def load(self) -> Iterator[DigitsTask]:
        """Yield the tasks of the split."""
        first = {"train": 0, "test": 1000}[self.config.split]
        for number in range(first, first + self.config.size):
            yield DigitsTask(vf.TaskData(prompt=f"say {number}"), self.config.task)


class PuzzlesConfig(vf.TasksetConfig):
    """Options of the taskset: a generator of reasoning-gym and its settings."""

    generator: str = "chain_sum"
    size: int = 100
    seed: int = 1
    settings: dict[str, Any] = Field(default_factory=dict)


class PuzzleData(vf.TaskData):
    """A problem with what its score needs."""

    entry: dict[str, Any]


class PuzzleTask(vf.Task[PuzzleData]):
    """Answer a question; reasoning-gym scores it."""

    @vf.reward
    async def solved(self, trace: vf.Trace) -> float:
        """Return reasoning-gym's own score of the reply."""
        import reasoning_gym

        score = reasoning_gym.get_score_answer_fn(self.data.entry["metadata"]["source_dataset"])
        return score(trace.last_reply, self.data.entry)


class PuzzlesTaskset(vf.Taskset[PuzzleTask, PuzzlesConfig]):
    """Problems of one generator."""

    def load(self) -> Iterator[PuzzleTask]:
        """Yield the problems of the seed."""
        import reasoning_gym

        settings = {"size": self.config.size, "seed": self.config.seed, **self.config.settings}
        for entry in reasoning_gym.create_dataset(self.config.generator, **settings):
            yield PuzzleTask(PuzzleData(prompt=entry["question"], entry=dict(entry)), self.config.task)
