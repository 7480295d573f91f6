"""Results of a batch: one result for each item, in the order of the items, and their summary."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from statistics import fmean
from typing import Any

from attrs import frozen

from areal_actors.cache import parse_reward
from areal_actors.domain import InteractionId, SessionId
from areal_actors.errors import EpisodeError, RewardError

__all__ = ["BatchResult", "ItemResult", "parse_outcome"]

Outcome = float | Mapping[InteractionId, float] | None
"""The final reward, rewards by completion id, or ``None`` if the function has set rewards or finalized itself."""


@frozen(kw_only=True)
class ItemResult:
    """The result of one item. ``session`` and ``outcome`` are those of the last attempt."""

    index: int
    item: Any
    num_attempts: int
    session: SessionId | None = None
    """The session's id, or ``None`` if no session could be started."""
    outcome: Outcome = None
    error: Exception | None = None
    """The error of the last attempt, or ``None`` if it succeeded."""

    @property
    def is_failed(self) -> bool:
        """Whether every attempt failed."""
        return self.error is not None

    @property
    def reward(self) -> float | None:
        """The final reward, or the sum of the rewards by completion; ``None`` if the function returned none."""
        return sum(self.outcome.values()) if isinstance(self.outcome, Mapping) else self.outcome


@frozen(kw_only=True)
class BatchResult:
    """The results of all items, in their order."""

    results: tuple[ItemResult, ...]
    seconds: float

    @cached_property
    def failed(self) -> tuple[ItemResult, ...]:
        """The items that failed."""
        return tuple(result for result in self.results if result.is_failed)

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards that the function returned, in order."""
        return tuple(result.reward for result in self.results if not result.is_failed and result.reward is not None)

    @property
    def num_retries(self) -> int:
        """The number of attempts beyond the first, over all items."""
        return sum(result.num_attempts - 1 for result in self.results)

    def __str__(self) -> str:
        """Summarize the batch in one line."""
        parts = [f"{len(self.results) - len(self.failed)} of {len(self.results)} items in {self.seconds:.1f} s"]
        if self.rewards:
            parts.append(f"mean reward {fmean(self.rewards):.3f}")
        if self.num_retries:
            parts.append(f"{self.num_retries} retries")
        if self.failed:
            first = self.failed[0]
            parts.append(f"{len(self.failed)} failed, first item {first.index}: {describe(first.error)}")
        return ", ".join(parts)


def describe(error: BaseException | None) -> str:
    """Return an error's type and message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def parse_outcome(value: Any, *, name: str) -> Outcome:
    """Convert the return value of the function ``name`` to an outcome.

    Raises:
        EpisodeError: it is neither a finite number, nor a dict of finite numbers by completion id, nor ``None``.
    """
    if value is None:
        return None
    try:
        if isinstance(value, Mapping):
            return {InteractionId(_completion(key)): parse_reward(reward) for key, reward in value.items()}
        return parse_reward(value)
    except RewardError as error:
        raise EpisodeError(
            f"{name} returned what is no reward: {error} Return a number, a dict of numbers by completion id, or None "
            "after setting rewards or finalizing by itself."
        ) from error


def _completion(key: Any) -> str:
    if not isinstance(key, str):
        raise RewardError(f"A reward is named by the id of its completion, not by {type(key).__name__} {key!r}.")
    return key
