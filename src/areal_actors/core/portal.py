"""The entrance for threads and synchronous code: the verbs of a ref, blocking.

A portal may be used by any number of threads at once, but never from the event loop's own, which it would block.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from anyio.from_thread import BlockingPortal

from areal_actors.core.message import Message
from areal_actors.core.ref import Ref
from areal_actors.errors import ActorStopped

__all__ = ["Portal"]

P = TypeVar("P")
R = TypeVar("R")


class Portal:
    """Made by ``ActorSystem.portal()``. Leaving its block ends nothing: the actors belong to the system."""

    def __init__(self, portal: BlockingPortal | None, system: str) -> None:
        self._portal = portal
        self._system = system

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to release; the form is kept so that it can be."""

    def ask(self, ref: Ref[P], message: Message[P, R], *, timeout: float | None = None) -> R:
        """As ``Ref.ask``, blocking this thread."""
        return self._call(lambda: ref.ask(message, timeout=timeout))

    def tell(self, ref: Ref[P], message: Message[P, Any]) -> None:
        """As ``Ref.tell``, blocking this thread while the mailbox is full."""
        self._call(lambda: ref.tell(message))

    def stop(self, ref: Ref[Any], *, grace: float | None = None) -> None:
        """As ``Ref.stop``, blocking this thread."""
        self._call(lambda: ref.stop(grace=grace))

    def _call(self, call: Callable[[], Awaitable[R]]) -> R:
        if self._portal is None:
            raise ActorStopped(f"system {self._system!r} is not open")
        try:
            return self._portal.call(call)
        except RuntimeError as error:
            if "not running" not in str(error):
                raise
            raise ActorStopped(f"system {self._system!r} is closed; no actor can be reached") from None
