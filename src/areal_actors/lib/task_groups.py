"""Task groups behind a block of a caller, who sees the exception of the block as it is and not in a group."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Iterate over the plain exceptions inside ``error``, at any depth, in order; a plain exception is its own leaf."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for inner in error.exceptions:
        yield from leaves(inner)


@asynccontextmanager
async def open_tasks() -> AsyncIterator[TaskGroup]:
    """Open a task group for the tasks behind a block, which raises the block's own exception as it is, not in a group.

    If a task has raised another error, the group is raised: the block was then only cancelled, and its exception alone
    would not show the cause.
    """
    body: BaseException | None = None
    try:
        async with anyio.create_task_group() as tasks:
            try:
                yield tasks
            except BaseException as error:
                body = error
                raise
    except BaseExceptionGroup as group:
        own = () if body is None else tuple(leaves(body))
        if body is None or any(leaf not in own for leaf in leaves(group)):
            raise
        raise body from body.__cause__
    finally:
        # Its traceback refers to this frame, which would make a reference cycle.
        del body
