"""Detection of asks that could never end, before they start to wait.

The wait graph has two kinds of edges. A running frame waits for the asks, streams and full mailboxes in its ``waits``.
A queued envelope waits for the frame that occupies the loop of its actor: the handler that is running there, if it is a
serial one. A concurrent handler occupies nothing. A wait is refused if the frame that is about to wait can be reached
from the frame that would block it, because the wait would close a cycle.

This covers both chains (A asks B, whose handler asks A) and independent requests that cross (A asks B while B asks A),
within one process. A cycle through handlers that are merely at their concurrency limit is not detected; use deadlines
there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_actors.core.envelope import Frame, Phase, current_frame
from areal_actors.errors import DeadlockError

if TYPE_CHECKING:
    from areal_actors.core.cell import Cell

__all__ = ["asking_frame", "refuse_deadlock", "refuse_self_stop"]

_DONE = Phase.DONE
_QUEUED = Phase.QUEUED


def asking_frame() -> Frame | None:
    """Return the frame that this task works for; ``None`` outside actors and for work that outlived its frame."""
    frame = current_frame.get()
    return None if frame is None or frame.phase is _DONE else frame


def refuse_deadlock(waiter: Frame, target: Cell, what: str) -> None:
    """Check that ``waiter`` may wait until ``target`` takes its next message.

    Raises:
        DeadlockError: the wait would close a cycle; the message shows the path.
    """
    blocker = target.occupant()
    # Fast path for almost every ask: an idle target, or a blocker that itself waits for nothing.
    if blocker is None or (blocker is not waiter and not blocker.waits):
        return
    path = _path(blocker, waiter)
    if path is None:
        return
    names = " → ".join(repr(cell.name) for cell in (waiter.cell, *(frame.cell for frame in path)))
    raise DeadlockError(
        f"{what} would wait for itself: {names}. "
        "Tell instead of asking, or declare the handler that waits with concurrency=2 or more."
    )


def refuse_self_stop(target: Cell) -> None:
    """Check that this task does not work, directly or through a chain of asks, for a handler of ``target``.

    Raises:
        DeadlockError: the stop would wait for the handler that waits for it.
    """
    frame = asking_frame()
    while frame is not None:
        if frame.cell is target:
            raise DeadlockError(
                f"a handler of actor {target.name!r} would wait for its own end; call context.stop() and return"
            )
        frame = frame.parent


def _path(start: Frame, goal: Frame) -> list[Frame] | None:
    seen: set[Frame] = {start}
    stack: list[tuple[Frame, list[Frame]]] = [(start, [start])]
    while stack:
        frame, path = stack.pop()
        if frame is goal:
            return path
        for following in _successors(frame):
            if following not in seen:
                seen.add(following)
                stack.append((following, [*path, following]))
    return None


def _successors(frame: Frame) -> list[Frame]:
    # A queued envelope waits for the loop; a running frame waits for what it has asked.
    if frame.phase is _QUEUED:
        occupant = frame.cell.occupant()
        return [] if occupant is None else [occupant]
    return [awaited for awaited in frame.waits if awaited.phase is not _DONE]
