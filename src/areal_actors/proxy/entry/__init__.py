"""One entry point for several proxies: each request is forwarded to the proxy where its session lives.

``targets`` decides where to, ``forwarding`` carries bytes, ``server`` is the actor that listens.
"""

from __future__ import annotations

from areal_actors.proxy.entry.config import EntryConfig
from areal_actors.proxy.entry.server import EntryServer
from areal_actors.proxy.entry.targets import Backend, Targets

__all__ = ["Backend", "EntryConfig", "EntryServer", "Targets"]
