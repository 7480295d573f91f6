"""Roles of turns: which calls of an episode are the agent's, and which are a user simulator's, a judge's or a tool's.

A turn's role is its ``tag``, by which a request is attributed; one that nothing attributes is the agent's. With
``train_roles``, the turns of other roles are not trained, and rewards are computed as if they were not there: a judge's
answer neither takes the outcome of the episode nor dilutes the return of the answer that it judges. Their tokens stay
in the prompts of the turns that continue them.
"""

from __future__ import annotations

from collections.abc import Collection

from attrs import evolve

from areal_actors.domain import Interaction, InteractionStatus, RewardScope, SessionRecord

AGENT_ROLE = "agent"
"""The role of requests without attribution."""
ROLE_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Names of roles: they are parts of URLs, and values of a header."""


def role_of(turn: Interaction) -> str:
    """Return the role of a turn."""
    return turn.tag or AGENT_ROLE


def select_roles(record: SessionRecord, roles: Collection[str] | None) -> SessionRecord:
    """Return the record with the turns of ``roles`` only, for the computation of rewards; ``None`` keeps all.

    A turn that continues one of another role continues the nearest kept turn before it. An outcome that was stored on
    an answer of another role, because that was the last one, moves to the last answer that is kept.
    """
    if roles is None or all(role_of(turn) in roles for turn in record.interactions):
        return record
    known = {turn.id: turn for turn in record.interactions}
    kept: list[Interaction] = []
    for turn in record.interactions:
        if role_of(turn) in roles:
            parent = turn.parent
            while parent is not None and role_of(known[parent]) not in roles:
                parent = known[parent].parent
            kept.append(evolve(turn, parent=parent))
    # The outcome belongs to the whole episode, although it is stored on the answer that was the last one.
    outcome = record.outcome
    completed = [turn for turn in kept if turn.status is InteractionStatus.COMPLETED]
    if outcome is not None and outcome.reward is not None and role_of(outcome) not in roles and completed:
        last = max(completed, key=lambda turn: (turn.completed_order or 0, turn.order))
        moved = evolve(last, reward=(last.reward or 0.0) + outcome.reward, reward_scope=RewardScope.EPISODE)
        kept = [moved if turn.id == last.id else turn for turn in kept]
    return evolve(record, interactions=tuple(kept))
