"""What tests need, ours and yours: virtual time for both event loops."""

from __future__ import annotations

from areal_actors.testing.virtual_time import AutojumpLoop, virtual_backend

__all__ = ["AutojumpLoop", "virtual_backend"]
