"""What code inside an episode can ask about itself: ``workflow_context.get()``, isolated per episode.

A context variable, so that concurrent episodes of one process do not see each other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from attrs import frozen

__all__ = ["EpisodeContext", "enter", "get", "stat_scope"]


@frozen(kw_only=True)
class EpisodeContext:
    """The episode that runs: ``task_id`` names the problem, ``member`` the episode within its group."""

    task_id: str = ""
    member: int = 0
    is_eval: bool = False


_OUTSIDE = EpisodeContext()
_current: ContextVar[EpisodeContext] = ContextVar("areal_episode", default=_OUTSIDE)


def get() -> EpisodeContext:
    """The context of the episode that runs here; an empty one outside of episodes."""
    return _current.get()


def stat_scope() -> str:
    """Under which name statistics of this episode are kept: ``rollout`` or ``eval-rollout``."""
    return "eval-rollout" if get().is_eval else "rollout"


@contextmanager
def enter(context: EpisodeContext) -> Iterator[EpisodeContext]:
    """Run a block as part of an episode."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
