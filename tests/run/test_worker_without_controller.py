"""A worker that does not find its controller: it ends, and gives back what it has."""

from __future__ import annotations

import anyio
import pytest

from areal_actors import worker
from areal_actors.schedulers.bootstrap import Bootstrap
from areal_actors.testing import virtual_backend

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest):
    """Both loops, in virtual time."""
    return virtual_backend(request.param)


@pytest.mark.parametrize("rank", [0, 1])
async def test_worker_ends_if_controller_is_gone_at_start(tmp_path, rank, caplog):
    """It has no lease yet, and would hold its node until the cluster's time limit."""
    told = Bootstrap(
        name="trainer-0",
        life=1000,
        address=f"unix:{tmp_path}/home.sock",
        secret=b"a secret of a controller that is gone",
        rank=rank,
        num_tasks=2,
    )
    with anyio.fail_after(600):
        code = await vars(worker)["_work"](told)

    assert 0 != code
    assert "the connection is down (no answer at" in caplog.text
