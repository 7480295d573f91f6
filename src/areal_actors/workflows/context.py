"""What code inside an episode can ask about itself, and log of itself: ``get()`` and ``log()``, isolated per episode.

A context variable, so that concurrent episodes of one process do not see each other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from attrs import frozen

from areal_actors.domain import EVAL_SCOPE, SCOPE, merge_numbers
from areal_actors.errors import InvalidRequest

__all__ = ["EpisodeContext", "enter", "get", "log", "logged", "stat_scope"]


@frozen(kw_only=True)
class EpisodeContext:
    """The episode that runs: ``task_id`` names the problem, ``member`` the episode within its group."""

    task_id: str = ""
    member: int = 0
    is_eval: bool = False


_OUTSIDE = EpisodeContext()
_current: ContextVar[EpisodeContext] = ContextVar("areal_episode", default=_OUTSIDE)
_numbers: ContextVar[dict[str, float] | None] = ContextVar("areal_episode_numbers", default=None)
"""Those of the episode, changed in place: tasks that it starts have the same ones."""


def get() -> EpisodeContext:
    """The context of the episode that runs here; an empty one outside of episodes."""
    return _current.get()


def stat_scope() -> str:
    """Under which name statistics of this episode are kept, those that it logs among them: ``rollout/format_ok``.

    ``rollout``, or ``eval-rollout`` in an evaluation.
    """
    return EVAL_SCOPE if get().is_eval else SCOPE


def log(**numbers: float) -> None:
    """Log named numbers of this episode: ``log(format_ok=1.0, judge=0.8)``.

    Their means over the episodes of a step stand in its metrics as ``rollout/<name>``. A name that is logged again
    gets the new value. Raises ``InvalidRequest`` for a value that is no finite number and for too many names, and
    outside of episodes: there is nothing to log of.
    """
    kept = _numbers.get()
    if kept is None:
        raise InvalidRequest("workflow_context.log was called outside of an episode; call it inside the agent's run.")
    kept.update(merge_numbers(kept, numbers))


def logged() -> Mapping[str, float]:
    """What was logged of this episode so far."""
    return dict(_numbers.get() or {})


@contextmanager
def enter(context: EpisodeContext) -> Iterator[EpisodeContext]:
    """Run a block as part of an episode."""
    token, numbers = _current.set(context), _numbers.set({})
    try:
        yield context
    finally:
        _numbers.reset(numbers)
        _current.reset(token)
