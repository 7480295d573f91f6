"""One entry point for several proxies: each request is forwarded to the proxy that has its session.

A host also starts services on demand, and selects the service by the user's key (``hosting``). ``forwarding``
selects the proxy and transfers requests and answers, and ``server`` has the actors that listen.
"""

from __future__ import annotations

from areal_actors.proxy.forwarding import Backend
from areal_actors_service.entry.app import EntryConfig, Targets
from areal_actors_service.entry.hosting import HostPeers
from areal_actors_service.entry.server import EntryServer, HostServer

__all__ = ["Backend", "EntryConfig", "EntryServer", "HostPeers", "HostServer", "Targets"]
