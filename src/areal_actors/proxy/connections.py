"""A workaround for Hypercorn: close connections as soon as their clients have closed them.

Hypercorn 0.18 (``asyncio/tcp_server.py`` and ``trio/tcp_server.py``) starts an idle timer for each connection, in the
task group that the connection waits for. It stops the timer when a request arrives and in ``_close``, which runs after
the task group. A client that disconnects while its connection is idle therefore leaves a socket in CLOSE_WAIT and its
descriptor open until the timer ends: 75 seconds with our ``keep_alive_timeout``. At about 14 new clients a second,
1,020 descriptors were held, and a process with a limit of 1,024 accepted no more. Hypercorn has no setting for this.
``worker_serve`` looks its class up as a name of its module, so this module replaces that name.
"""

from __future__ import annotations

from typing import Any

from hypercorn.events import Event, Updated

__all__ = ["release_on_asyncio", "release_on_trio"]


class _ReleasingConnection:
    """A mixin for Hypercorn's ``TCPServer`` of either event loop: it stops the idle timer when reading has ended."""

    idle_task: Any  # AsyncioSingleTask or TrioSingleTask
    _has_ended = False

    async def protocol_send(self, event: Event) -> None:
        # An answer that completes after the client has left would start the timer again.
        if self._has_ended and isinstance(event, Updated):
            return
        await super().protocol_send(event)  # type: ignore[misc]  # of TCPServer, which comes next

    async def _read_data(self) -> None:
        await super()._read_data()  # type: ignore[misc]  # of TCPServer, which comes next
        self._has_ended = True
        await self.idle_task.stop()


def release_on_asyncio() -> None:
    """Make Hypercorn on asyncio close connections when their clients do. Calling it again has no effect."""
    from hypercorn.asyncio import run

    _replace_server(run)


def release_on_trio() -> None:
    """Make Hypercorn on trio close connections when their clients do. Calling it again has no effect."""
    from hypercorn.trio import run

    _replace_server(run)


def _replace_server(module: Any) -> None:  # Any: Hypercorn does not export the name from here
    if not issubclass(module.TCPServer, _ReleasingConnection):
        module.TCPServer = type("TCPServer", (_ReleasingConnection, module.TCPServer), {})
