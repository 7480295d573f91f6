"""Actors in other processes and on other nodes: a ``Ref`` over a connection keeps the guarantees of a local one.

::

    async with listen("unix:/run/user/1000/areal/s.sock", secret=secret, expose={"sessions": sessions}): ...

    async with connect("unix:/run/user/1000/areal/s.sock", secret=secret) as peer:
        sessions = peer.ref(Sessions, "sessions")          # Ref[Sessions]
        view = await sessions.ask(DescribeSessions())

The layers, from the bytes upwards: ``frames`` and ``codec`` (no sockets), ``connection`` (one socket), ``hello`` (the
handshake), ``calls`` and ``serving`` (the two directions of a connection), ``peer`` (both directions), ``transport``
(listening and connecting), ``standing`` (refs to actors that move).
"""

from __future__ import annotations

from areal_actors.core.remote.limits import Limits
from areal_actors.core.remote.peer import Peer
from areal_actors.core.remote.standing import Line, standing, standing_from
from areal_actors.core.remote.transport import Listener, connect, connect_stream, listen

__all__ = ["Limits", "Line", "Listener", "Peer", "connect", "connect_stream", "listen", "standing", "standing_from"]
