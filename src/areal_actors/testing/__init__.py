"""Tools for tests, of this library and of yours: virtual time, an engine without a model, laws and strategies.

``engines`` has an engine without a model, ``strategies`` strategies for Hypothesis, ``laws`` the laws of reward rules.
Only virtual time is imported here, because the rest needs Hypothesis or an engine. Contracts of plug-ins and fake
servers are in the distribution ``areal-actors-testing``.
"""

from __future__ import annotations

from areal_actors.testing.virtual_time import AutojumpLoop, virtual_backend

__all__ = ["AutojumpLoop", "virtual_backend"]
