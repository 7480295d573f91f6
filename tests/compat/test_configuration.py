"""The documented settings: their names, their defaults, and the other names they go by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_actors import create_config
from areal_actors.config import AgentMode, RunConfig

LEAST = {"experiment_name": "my_exp", "model": "tiny", "total_steps": 1, "dataset": {"jsonl": "none.jsonl"}}


def configure(**rollout: Any) -> RunConfig:
    return create_config(LEAST | {"rollout": {"workflow": "my_module.MyAgent"} | rollout})


def test_defaults() -> None:
    """Inline, undiscounted, a row for each interaction, four processes."""
    agent = configure().rollout.openai

    assert (AgentMode.INLINE, 1.0, "individual") == (agent.mode, agent.turn_discount, str(agent.export_style))
    assert 4 == agent.subproc_max_workers


@pytest.mark.parametrize("section", ["openai", "agent"])
@pytest.mark.parametrize("mode", ["inline", "subproc", "subprocess"])
def test_agents(section: str, mode: str) -> None:
    """Under either name of the section."""
    wanted = {"mode": mode, "turn_discount": 0.9, "export_style": "concat", "subproc_max_workers": 2}
    agent = configure(**{section: wanted}).rollout.openai

    assert (AgentMode.INLINE if mode == "inline" else AgentMode.SUBPROCESS) is agent.mode
    assert (0.9, "concat", 2) == (agent.turn_discount, str(agent.export_style), agent.subproc_max_workers)


def test_rollouts() -> None:
    """Groups, the bounds of what runs ahead, and dumps."""
    config = configure(
        group_size=4,
        max_concurrent_rollouts=16,
        max_head_offpolicyness=2,
        dump_to_file=True,
        fileroot="/path/to/logs",
        tokenizer_path="model/tokenizer",
    )

    assert (4, 16, 2) == (
        config.rollout.group_size,
        config.rollout.max_concurrent_rollouts,
        config.rollout.max_head_offpolicyness,
    )
    assert config.rollout.dump_to_file is True
    assert Path("/path/to/logs/my_exp/trial/rollout") == config.run_directory.rollouts


def test_store_is_honoured_by_route() -> None:
    """For chat and not for Responses, unless it is said."""
    honoured = configure().proxy.honour_store

    assert (True, False) == (honoured.chat, honoured.responses)
