"""The former name of ``areal_actors.kernel``, and that of AReaL for ``AgentSession`` and ``AgentRunner``."""

from __future__ import annotations

from areal_actors.kernel import *  # noqa: F403  every public name keeps its old path

# As in ``areal_actors``: hidden from type checkers, for which such a module has every attribute.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from areal_actors.client import AgentRunner as AgentRunner
    from areal_actors.client import AgentSession as AgentSession
else:

    def __getattr__(name: str) -> object:
        """Import what the clients of a service have on first use: an actor needs no HTTP client."""
        if name not in ("AgentRunner", "AgentSession"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from areal_actors import client

        return getattr(client, name)
