"""Both loops, in virtual time."""

from __future__ import annotations

import pytest

from areal_actors.testing import virtual_backend


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest):
    """Both loops, in virtual time."""
    return virtual_backend(request.param)
