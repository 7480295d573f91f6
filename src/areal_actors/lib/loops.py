"""The event loop of a process, and primitives that the kernel takes from it directly instead of through anyio.

Parking one task and waking it is the most frequent operation of a mailbox. An ``anyio.Event`` does more than that needs
(any number of waiters, a look-up of the back end at each construction), and two of them per ask cost more than the rest
of the kernel: 13 µs compared with 7 µs for a future on asyncio, 16 µs compared with 13 µs for a parked task on trio.
Likewise, using trio's own cancel scope saves a layer. All code outside that path uses anyio.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar, cast

import anyio
from attrs import frozen

from areal_actors.errors import ConfigError

T = TypeVar("T")

_VARIABLE = "AREAL_EVENT_LOOP"


class EventLoop(StrEnum):
    """The implementation of asyncio's event loop that a process runs on."""

    ASYNCIO = "asyncio"
    UVLOOP = "uvloop"
    """The package of this name: cheaper timers and sockets."""


def run(
    function: Callable[..., Awaitable[T]], *args: Any, event_loop: EventLoop | None = None, backend: str = "asyncio"
) -> T:
    """Run an async function in a new event loop, and return its result.

    Args:
        function: called with ``args``.
        *args: for the function.
        event_loop: for the backend asyncio; by default that of the parent process, if it passed ``child_variables``.
        backend: ``asyncio`` or ``trio``.

    Raises:
        ConfigError: uvloop is not installed.
    """
    if event_loop is None:
        event_loop = EventLoop(os.environ.get(_VARIABLE, EventLoop.ASYNCIO))
    is_uvloop = backend == "asyncio" and event_loop is EventLoop.UVLOOP
    if is_uvloop and find_spec("uvloop") is None:
        raise ConfigError("event_loop: uvloop is not installed: pip install 'areal_actors[uvloop]'")
    return anyio.run(function, *args, backend=backend, backend_options={"use_uvloop": True} if is_uvloop else {})


def child_variables() -> Mapping[str, str]:
    """Return the environment variables with which a child process runs on the event loop of this task."""
    is_uvloop = not is_trio() and type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    return {_VARIABLE: EventLoop.UVLOOP} if is_uvloop else {}


Scope = anyio.CancelScope
"""The type of a cancel scope. On trio it is trio's own class, of which the kernel uses only the shared part."""


class Signal(Protocol):
    """A one-shot event for a single waiter. If it is set before the wait, the wait returns at once."""

    def set(self) -> None:
        """Wake the waiter, now or when it arrives; setting it twice has no further effect."""

    def wait(self) -> Awaitable[None]:
        """Wait until the signal is set. The waiter may be cancelled."""
        ...


@frozen(kw_only=True, eq=False)
class Loop:
    """The primitives of one running event loop."""

    new_signal: Callable[[], Signal]
    new_scope: Callable[..., Scope]
    """Create a cancel scope: ``new_scope(deadline=..., shield=...)``."""
    now: Callable[[], float]
    """The loop's clock, in seconds."""
    effective_deadline: Callable[[], float]
    """The nearest deadline of the cancel scopes around the running task; infinite if there is none."""
    call_soon: Callable[[Callable[[], object]], object]
    """Schedule a function on the loop and return at once. The only primitive here that any thread may call."""


def loop_identity() -> object:
    """Return an object that identifies the event loop of this task; compare it with ``is``."""
    if is_trio():
        import trio

        return trio.lowlevel.current_trio_token()
    return asyncio.get_running_loop()


def running_loop() -> Loop:
    """Return the primitives of the event loop that runs this task."""
    if is_trio():
        return _trio_loop()
    loop = asyncio.get_running_loop()
    create_future = loop.create_future

    return Loop(
        new_signal=lambda: _FutureSignal(create_future()),
        # anyio's constructor looks up the back end on every call; the concrete class skips that.
        new_scope=type(anyio.CancelScope()),
        now=loop.time,
        effective_deadline=anyio.current_effective_deadline,
        call_soon=loop.call_soon_threadsafe,
    )


def is_trio() -> bool:
    """Return whether the running task belongs to trio."""
    # Not imported where the program has not done so: if it is not loaded, it is not running.
    trio = sys.modules.get("trio")
    return trio is not None and trio.lowlevel.in_trio_task()


class _FutureSignal:
    """A signal on asyncio: a future."""

    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[None]) -> None:
        self._future = future

    def set(self) -> None:
        # The future is cancelled if its waiter was; setting its result would raise ``InvalidStateError``.
        if not self._future.done():
            self._future.set_result(None)

    def wait(self) -> Awaitable[None]:
        return self._future


class _ParkedSignal:
    """A signal on trio: a parked task."""

    __slots__ = ("_is_set", "_lowlevel", "_task")

    def __init__(self, lowlevel: Any) -> None:  # Any: the module, which is imported only where trio runs
        self._lowlevel = lowlevel
        self._is_set = False
        self._task: Any = None

    def set(self) -> None:
        self._is_set = True
        task, self._task = self._task, None
        if task is not None:
            self._lowlevel.reschedule(task)

    async def wait(self) -> None:
        if not self._is_set:
            self._task = self._lowlevel.current_task()
            await self._lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: Any) -> Any:  # Any: functions and values of trio
        self._task = None
        return self._lowlevel.Abort.SUCCEEDED


def _trio_loop() -> Loop:
    # Imported here, as trio is.
    import trio

    return Loop(
        new_signal=lambda: _ParkedSignal(trio.lowlevel),
        new_scope=cast("Callable[..., Scope]", trio.CancelScope),
        now=trio.current_time,
        effective_deadline=trio.current_effective_deadline,
        call_soon=trio.lowlevel.current_trio_token().run_sync_soon,
    )
