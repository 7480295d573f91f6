"""What code inside an episode knows of it, and that no other episode does."""

from __future__ import annotations

import anyio
import pytest

from areal_actors.workflows import EpisodeContext
from areal_actors.workflows import context as workflow_context


def test_outside_of_episodes_there_is_an_empty_context():
    """Code that asks runs anywhere."""
    assert EpisodeContext() == workflow_context.get()
    assert "rollout" == workflow_context.stat_scope()


def test_block_is_part_of_its_episode_and_leaves_it_when_it_raises():
    """Contexts nest, and end with their block."""
    outer, inner = EpisodeContext(task_id="1"), EpisodeContext(task_id="1", member=2, is_eval=True)
    with workflow_context.enter(outer):
        with pytest.raises(KeyError), workflow_context.enter(inner):
            assert inner == workflow_context.get()
            assert "eval-rollout" == workflow_context.stat_scope()
            raise KeyError
        assert outer == workflow_context.get()

    assert EpisodeContext() == workflow_context.get()


@pytest.mark.anyio
async def test_concurrent_episodes_do_not_see_each_other():
    """Each task has its own, also after it has waited."""
    seen = {}

    async def episode(member: int) -> None:
        with workflow_context.enter(EpisodeContext(member=member)):
            await anyio.lowlevel.checkpoint()
            seen[member] = workflow_context.get().member

    async with anyio.create_task_group() as tasks:
        for member in range(4):
            tasks.start_soon(episode, member)

    assert {member: member for member in range(4)} == seen
