"""Conversion of exceptions at the boundary of an actor, and extraction of root causes from exception groups.

An error that a handler raises during an **ask** or a **stream** is converted by these rules:

* an ``ArealError`` that is not an ``ActorError`` was raised on purpose and is part of the answer: the asker gets a new
  instance of the same class with the same arguments and attributes (a ``NotFound`` keeps its status and its param);
* a ``RemoteError`` passes on unchanged, so that it keeps naming the actor where it began;
* everything else, including other ``ActorError`` (they describe a different ask), becomes a ``RemoteError``: text.

No exception object, and thus no traceback with its frames, is ever shared between two tasks. ``wire`` converts errors
to plain data; ``errors`` defines the error classes.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator

from areal_actors.core.loops import is_trio
from areal_actors.errors import ActorError, ActorStopped, ArealError, RemoteError

__all__ = ["is_stray_cancellation", "leaves", "root_cause", "transferred"]


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Iterate over the plain exceptions inside ``error``, at any depth, in order; a plain exception is its own leaf."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for inner in error.exceptions:
        yield from leaves(inner)


def root_cause(error: BaseException) -> BaseException:
    """Return the one exception that a person should read first.

    Inside a group, original errors come before ``ActorStopped`` and cancellations, which follow from them. Among equals
    the first one wins.
    """
    return min(leaves(error), key=_rank)


def transferred(error: BaseException, actor: str) -> ArealError:
    """Return a new error for the asker, converted from the ``error`` that a handler of ``actor`` raised."""
    cause = root_cause(error)
    if isinstance(cause, RemoteError) or (isinstance(cause, ArealError) and not isinstance(cause, ActorError)):
        return _copied(cause)
    text = "".join(traceback.format_exception(error))
    return RemoteError(actor, type(cause).__name__, str(cause), text)


def is_stray_cancellation(error: BaseException) -> bool:
    """Return whether ``error`` is a ``CancelledError`` in a task that was not cancelled.

    On asyncio, awaiting a future that other code cancelled raises it; on trio it is an exception like any other. It is
    an ordinary failure of the handler and must not be mistaken for the cancellation of the actor.
    """
    if not isinstance(error, asyncio.CancelledError):
        return False
    if is_trio():
        return True
    task = asyncio.current_task()
    return task is not None and task.cancelling() == 0


def _rank(error: BaseException) -> int:
    if isinstance(error, ActorStopped):
        return 1
    return 0 if isinstance(error, (Exception, KeyboardInterrupt, SystemExit)) else 2


def _copied(error: ArealError) -> ArealError:
    # Without the constructor, whose signature differs between classes.
    copy = type(error).__new__(type(error))
    copy.args = error.args
    copy.__dict__.update({name: value for name, value in vars(error).items() if name != "__notes__"})
    for note in getattr(error, "__notes__", ()):
        copy.add_note(note)
    return copy
