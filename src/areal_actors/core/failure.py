"""What becomes of exceptions at the border of an actor, and of exception groups in front of people.

The rule for an error that a handler lets out of an **ask** or a **stream**:

* an ``ArealError`` that is no ``ActorError`` was raised on purpose and is part of the answer: the asker gets a new
  instance of the same class with the same arguments and attributes (a ``NotFound`` keeps its status and its param);
* a ``RemoteError`` passes on unchanged, so that it keeps naming the actor where it began;
* everything else, other ``ActorError`` included (they speak of somebody else's ask), becomes a ``RemoteError``: text.

No exception object, and thus no traceback with its frames, is ever shared between two tasks. How an error becomes plain
data for a wire is told in ``wire``; which errors there are, in ``errors``.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator

from areal_actors.core.loops import is_trio
from areal_actors.errors import ActorError, ActorStopped, ArealError, RemoteError

__all__ = ["is_stray_cancellation", "leaves", "root_cause", "transferred"]


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The plain exceptions inside ``error``, however deeply grouped, in order; a plain exception is its own leaf."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for inner in error.exceptions:
        yield from leaves(inner)


def root_cause(error: BaseException) -> BaseException:
    """The one exception that a person should read first.

    Inside a group, what somebody raised comes before the stopped actors and cancelled tasks that followed from it;
    among equals the first one wins.
    """
    return min(leaves(error), key=_rank)


def transferred(error: BaseException, actor: str) -> ArealError:
    """``error``, raised by a handler of ``actor``, as the asker shall see it: always a new object."""
    cause = root_cause(error)
    if isinstance(cause, RemoteError) or (isinstance(cause, ArealError) and not isinstance(cause, ActorError)):
        return _copied(cause)
    text = "".join(traceback.format_exception(error))
    return RemoteError(actor, type(cause).__name__, str(cause), text)


def is_stray_cancellation(error: BaseException) -> bool:
    """Whether a ``CancelledError`` reached a task that nobody cancelled.

    On asyncio, awaiting a future that somebody else cancelled raises it; to trio it is an exception like any other. It
    is an ordinary failure of the handler, and must not pass for the cancellation of the actor.
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
    copy = type(error).__new__(type(error))
    copy.args = error.args
    copy.__dict__.update({name: value for name, value in vars(error).items() if name != "__notes__"})
    for note in getattr(error, "__notes__", ()):
        copy.add_note(note)
    return copy
