"""The end of a session's block, for all session clients."""

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
    """End the session with ``end``, unless it is ``None`` because the session was already ended, and close ``calls``.

    This takes ten seconds at most, cancelled or not. The errors in ``is_over`` mean that the session was ended before,
    and are ignored. Other errors are raised, unless the block itself failed: its ``error`` is never replaced by an
    error of ending the session.
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
