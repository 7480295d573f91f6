"""One entry point for several proxies: each request is forwarded to the proxy where its session lives.

A host starts them, too, and asks whose key it is (``hosting``).

``targets`` decides where to, ``forwarding`` carries bytes, ``server`` is the actor that listens.
"""

from __future__ import annotations

from areal_actors.proxy.entry.config import EntryConfig
from areal_actors.proxy.entry.hosting import HostPeers
from areal_actors.proxy.entry.server import EntryServer, HostServer
from areal_actors.proxy.entry.targets import Backend, Targets

__all__ = ["Backend", "EntryConfig", "EntryServer", "HostPeers", "HostServer", "Targets"]
