"""Who wants to hear how the incarnations of an actor end, wherever the actor runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from areal_actors.core.supervision import Down

__all__ = ["Watched", "Watcher"]

Watcher: TypeAlias = "Callable[[Down], object]"


class Watched:
    """The watchers of one actor. Its ``last_words``, once there are any, are told to those who come later."""

    __slots__ = ("_watchers", "last_words")

    def __init__(self) -> None:
        self._watchers: dict[Watcher, None] = {}
        self.last_words: Down | None = None

    def watch(self, watcher: Watcher) -> None:
        """Report the end of each incarnation to ``watcher``; at once if there will be no more."""
        if self.last_words is None:
            self._watchers[watcher] = None
        else:
            watcher(self.last_words)

    def unwatch(self, watcher: Watcher) -> None:
        """Forget a watcher, if it was one."""
        self._watchers.pop(watcher, None)

    def report(self, down: Down) -> None:
        """Bring news to all who watch."""
        for watcher in tuple(self._watchers):
            watcher(down)
