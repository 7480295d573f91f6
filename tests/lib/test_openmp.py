"""Ending teams of OpenMP workers, so that those of another thread may spin."""

import sys

import pytest
import torch

from areal_actors.lib.openmp import end_team
from areal_actors.lib.threads import OwnThread


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is what PyTorch uses on Linux")
@pytest.mark.anyio
async def test_thread_without_its_team_computes_the_same() -> None:
    """Only the workers are gone; the next operation starts others."""
    left, right = torch.randn(256, 512), torch.randn(512, 256)

    def compute() -> torch.Tensor:
        return left @ right

    async with OwnThread.open() as thread:
        before = await thread.run(compute)
        assert await thread.run(end_team)
        assert torch.equal(await thread.run(compute), before)
        # Twice in a row, and by a thread that never computed.
        assert await thread.run(end_team)
        assert await thread.run(end_team)
