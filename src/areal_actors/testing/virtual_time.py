"""Virtual time: an hour of sleeping takes milliseconds, and always takes the same number of steps.

When every task waits for the clock, the clock jumps to the next deadline. This works on asyncio (``AutojumpLoop``)
and on trio (its ``MockClock``)::

    @pytest.fixture(params=["asyncio", "trio"])
    def anyio_backend(request):
        return virtual_backend(request.param)

It is for tests in one process's memory. The clock cannot know that a socket, a subprocess or a thread is about to
answer, and would jump past it: use real time there.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class AutojumpLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose clock starts at zero and jumps to the next timer whenever nothing else can happen."""

    def __init__(self) -> None:
        self._virtual_now = 0.0
        super().__init__(_AutojumpSelector(self))

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._virtual_now

    def jump(self, seconds: float) -> None:
        """Advance the clock by ``seconds`` at once."""
        self._virtual_now += seconds


class _AutojumpSelector(selectors.DefaultSelector):
    """Polls instead of waiting for a timer, and advances the loop's clock by the requested timeout."""

    def __init__(self, loop: AutojumpLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready now; without a timer, wait for actual input or output."""
        events = super().select(0 if timeout is not None else None)
        if not events and timeout is not None and timeout > 0:
            self._loop.jump(timeout)
        return events


def virtual_backend(name: str) -> tuple[str, dict[str, Any]]:
    """Return backend and options for virtual time, for an ``anyio_backend`` fixture or for ``anyio.run``.

    Args:
        name: ``asyncio`` or ``trio``.

    Raises:
        ValueError: for any other name.
    """
    if name == "asyncio":
        return name, {"loop_factory": AutojumpLoop}
    if name == "trio":
        from trio.testing import MockClock

        return name, {"clock": MockClock(autojump_threshold=0)}
    raise ValueError(f"no virtual time for backend {name!r}; use 'asyncio' or 'trio'")
