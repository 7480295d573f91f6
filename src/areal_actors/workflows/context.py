"""Context of the current episode, for code inside it: ``get()`` and ``log()``, isolated per episode.

It is a context variable, so concurrent episodes of one process do not see each other's context.
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
    """The current episode: ``task_id`` names the problem, ``member`` the episode within its group."""

    task_id: str = ""
    member: int = 0
    is_eval: bool = False


_OUTSIDE = EpisodeContext()
_current: ContextVar[EpisodeContext] = ContextVar("areal_episode", default=_OUTSIDE)
_numbers: ContextVar[dict[str, float] | None] = ContextVar("areal_episode_numbers", default=None)
"""Numbers logged by the episode, changed in place: the tasks that it starts share the same dictionary."""


def get() -> EpisodeContext:
    """Return the context of the current episode; an empty one outside of episodes."""
    return _current.get()


def stat_scope() -> str:
    """Return the prefix of this episode's statistics, including those that it logs: ``rollout/format_ok``.

    It is ``rollout``, or ``eval-rollout`` in an evaluation.
    """
    return EVAL_SCOPE if get().is_eval else SCOPE


def log(**numbers: float) -> None:
    """Log named numbers of this episode: ``log(format_ok=1.0, judge=0.8)``.

    Their means over the episodes of a step appear in its metrics as ``rollout/<name>``. A name that is logged again
    gets the new value. Raises ``InvalidRequest`` for a value that is not a finite number, for too many names, and
    outside of episodes.
    """
    kept = _numbers.get()
    if kept is None:
        raise InvalidRequest("workflow_context.log was called outside of an episode; call it inside the agent's run.")
    kept.update(merge_numbers(kept, numbers))


def logged() -> Mapping[str, float]:
    """Return the numbers that this episode has logged so far."""
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
