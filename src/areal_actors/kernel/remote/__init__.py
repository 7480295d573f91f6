"""Actors in other processes and on other nodes: a ``Ref`` over a connection keeps the guarantees of a local one.

::

    async with listen("unix:/run/user/1000/areal/s.sock", secret=secret, expose={"sessions": sessions}): ...

    async with connect("unix:/run/user/1000/areal/s.sock", secret=secret) as peer:
        sessions = peer.ref(Sessions, "sessions")          # Ref[Sessions]
        view = await sessions.ask(DescribeSessions())

The layers, from the bytes upwards: ``sockets`` (addresses), ``frames`` and ``codec`` (messages as bytes),
``connection`` (one byte stream), ``hello`` (the handshake), ``peer`` (asking and answering over a connection),
``transport`` (listening and connecting), ``reconnect`` (refs to actors that move).
"""

from __future__ import annotations

from areal_actors.kernel.remote.frames import Limits
from areal_actors.kernel.remote.peer import Peer
from areal_actors.kernel.remote.reconnect import ReconnectingConnection, reconnecting
from areal_actors.kernel.remote.transport import Listener, connect, connect_stream, listen

__all__ = [
    "Limits",
    "Listener",
    "Peer",
    "ReconnectingConnection",
    "connect",
    "connect_stream",
    "listen",
    "reconnecting",
]
