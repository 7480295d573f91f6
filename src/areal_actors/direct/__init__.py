"""Official SDK clients whose requests never leave the process: the proxy's application behind an SDK, on an engine.

``ArealOpenAI`` is an ``AsyncOpenAI`` and ``ArealAnthropic`` an ``AsyncAnthropic``: every endpoint works as it does over
HTTP, including streams and disconnects. In addition, they have methods for trajectories: rewards, token data, training
rows. The SDKs are not dependencies of this package; each is imported with the client that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_actors.direct.anthropic import ArealAnthropic
    from areal_actors.direct.openai import ArealOpenAI

__all__ = ["ArealAnthropic", "ArealOpenAI"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the client called ``name``, and with it its SDK."""
        from importlib import import_module

        homes = {"ArealOpenAI": "openai", "ArealAnthropic": "anthropic"}
        if name not in homes:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{homes[name]}"), name)
