"""Context of the current episode, for code inside it: ``get()`` and ``log()``, isolated per episode.

It is a context variable, so concurrent episodes of one process do not see each other's context.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from attrs import frozen

from areal_actors.domain import EVAL_SCOPE, SCOPE, merge_numbers
from areal_actors.errors import InvalidRequest


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
_find_limit: ContextVar[Callable[[], Awaitable[str | None]] | None] = ContextVar("areal_episode_limit", default=None)


def get() -> EpisodeContext:
    """Return the context of the current episode; an empty one outside of episodes."""
    return _current.get()


async def reached_limit() -> str | None:
    """Return the limit of the episode that has refused a request to its model, such as ``max_turns``; ``None`` if none.

    It is known to code that runs in the process of the run, not in a child process.
    """
    find_limit = _find_limit.get()
    return None if find_limit is None else await find_limit()


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
def enter(
    context: EpisodeContext, *, find_limit: Callable[[], Awaitable[str | None]] | None = None
) -> Iterator[EpisodeContext]:
    """Run a block as part of an episode. ``find_limit`` returns the limit that refused a request."""
    token, numbers, finder = _current.set(context), _numbers.set({}), _find_limit.set(find_limit)
    try:
        yield context
    finally:
        _find_limit.reset(finder)
        _numbers.reset(numbers)
        _current.reset(token)
