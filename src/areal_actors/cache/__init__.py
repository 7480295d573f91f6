"""Token capture and rewards: sessions, their conversation trees, rewards and training rows.

All of this is plain code on frozen values that never waits: ``history`` and ``links`` find parents, ``tree`` owns the
interactions of a session and ``session`` the sessions, ``prompts`` plans exact prompts, ``rewards`` propagates rewards,
``export`` and ``tensors`` build training rows.
"""

from __future__ import annotations

from areal_actors.cache.export import STYLES, export_trajectories
from areal_actors.cache.history import full_history, full_ids, lookup_in, prompt_ids
from areal_actors.cache.links import Match
from areal_actors.cache.prompts import PromptRenderer, plan_prompt
from areal_actors.cache.rewards import (
    RULES,
    RewardTree,
    Rule,
    Unrewarded,
    backpropagate,
    load_rule,
    total_reward,
)
from areal_actors.cache.session import IssuedSession, Session, SessionSettings, SessionStore
from areal_actors.cache.tensors import from_tensors, pad_together, to_arrays, to_tensors
from areal_actors.cache.tree import ConversationTree, PromptPlan, parse_reward

__all__ = [
    "RULES",
    "STYLES",
    "ConversationTree",
    "IssuedSession",
    "Match",
    "PromptPlan",
    "PromptRenderer",
    "RewardTree",
    "Rule",
    "Session",
    "SessionSettings",
    "SessionStore",
    "Unrewarded",
    "backpropagate",
    "export_trajectories",
    "from_tensors",
    "full_history",
    "full_ids",
    "load_rule",
    "lookup_in",
    "pad_together",
    "parse_reward",
    "plan_prompt",
    "prompt_ids",
    "to_arrays",
    "to_tensors",
    "total_reward",
]
