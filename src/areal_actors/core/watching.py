"""Watchers of an actor, which are notified when its incarnations end, whichever process runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from areal_actors.core.supervision import Down

__all__ = ["Watched", "Watcher"]

Watcher: TypeAlias = "Callable[[Down], object]"


class Watched:
    """The watchers of one actor. Its ``last_words``, the final ``Down``, are delivered to later watchers."""

    __slots__ = ("_watchers", "last_words")

    def __init__(self) -> None:
        self._watchers: dict[Watcher, None] = {}
        self.last_words: Down | None = None

    def watch(self, watcher: Watcher) -> None:
        """Report the end of each incarnation to ``watcher``; immediately if the actor has ended for good."""
        if self.last_words is None:
            self._watchers[watcher] = None
        else:
            watcher(self.last_words)

    def unwatch(self, watcher: Watcher) -> None:
        """Remove ``watcher``, if it is registered."""
        self._watchers.pop(watcher, None)

    def report(self, down: Down) -> None:
        """Notify all watchers."""
        # Copied, because a watcher may unregister itself when it is called.
        for watcher in tuple(self._watchers):
            watcher(down)
