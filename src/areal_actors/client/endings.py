"""How the block of a client's session ends, whichever client it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from areal_actors.client.calls import ControlCalls
from areal_actors.errors import ArealError

__all__ = ["end_block"]

_END_SECONDS = 10.0


async def end_block(
    calls: ControlCalls,
    end: Callable[[], Awaitable[Any]] | None,
    *,
    error: BaseException | None,
    is_over: tuple[type[ArealError], ...] = (),
) -> None:
    """End the session with ``end``, unless it was ended, and close ``calls``.

    It takes ten seconds at most, cancelled or not. What ``is_over`` names is met where the session was ended before,
    and is no error. Another one is raised, unless the block itself failed: its ``error`` is never hidden by one of the
    ending.
    """
    try:
        if end is not None:
            with anyio.move_on_after(_END_SECONDS, shield=True):
                await end()
    except is_over:
        pass
    except ArealError:
        if error is None:
            raise
    finally:
        await calls.close()
