"""Conversation trees: what a session remembers of each request and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NewType

from attrs import field, frozen

from areal_actors.domain.arrays import Ints, array_equality, as_ints
from areal_actors.domain.chat import ChatMessage, InteractionId, SessionId
from areal_actors.domain.sampling import Completion, SamplingDistribution

GroupId = NewType("GroupId", str)


class InteractionStatus(StrEnum):
    """How far an interaction came. Only completed ones are trained by default."""

    PENDING = "pending"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class ForkReason(StrEnum):
    """Why a turn does not extend the exact tokens of the turn before it."""

    ROOT = "root"
    """Nothing of ours stands in its history."""
    SIBLING = "sibling"
    """The prompt of another root was asked again."""
    TEMPLATE_REWROTE_HISTORY = "template_rewrote_history"
    CLIENT_EDITED_HISTORY = "client_edited_history"
    HISTORY_TRUNCATED = "history_truncated"
    """The client left earlier messages out and kept an answer of ours."""
    NEW_SYSTEM_PROMPT = "new_system_prompt"
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_OPTIONS_CHANGED = "template_options_changed"
    PARENT_UNFINISHED = "parent_unfinished"


class RewardScope(StrEnum):
    """What a reward was set for. The reward itself is kept on one answer in any case."""

    ANSWER = "answer"
    """That answer, which was named by its id."""
    LAST = "last"
    """The answer that had been completed last: the outcome of the episode while no other answer has a reward."""
    EPISODE = "episode"
    """The whole episode: what an agent returned, or the final reward of ``finalize``."""


@frozen(kw_only=True)
class Interaction:
    """One request and its answer within a session's tree.

    Two parents: ``parent`` is the turn whose answer this one continues, and carries rewards; ``token_parent`` is the
    one whose exact tokens are a prefix of this prompt, and carries packing and KV reuse. A fork has the first without
    the second, and says why in ``fork``. ``prompt_suffix`` holds the prompt ids beyond the token parent's prompt and
    output (the whole prompt where there is no token parent). ``messages`` are those beyond the conversational
    parent's prompt and answer (all of them for a root); the first ``num_instructions`` of them take the place of the
    parent's leading instructions (``None``: those stay). ``has_instructions`` tells that the first message of the whole
    history was meant for this request alone. ``order`` counts requests, ``completed_order`` counts completions in a
    session. ``reward`` is the number that was set, ``reward_scope`` what it was set for. ``failure`` says why a failed
    one failed. ``sampling`` is the distribution that the answer is sampled from, ``None`` where it is
    unknown.
    """

    id: InteractionId
    order: int
    parent: InteractionId | None = None
    token_parent: InteractionId | None = None
    fork: ForkReason | None = None
    messages: tuple[ChatMessage, ...] = ()
    num_instructions: int | None = None
    has_instructions: bool = False
    prompt_suffix: Ints = field(converter=as_ints, eq=array_equality)
    num_prompt_tokens: int
    completion: Completion | None = None
    output: ChatMessage | None = None
    status: InteractionStatus = InteractionStatus.PENDING
    completed_order: int | None = None
    reward: float | None = None
    reward_scope: RewardScope = RewardScope.ANSWER
    is_stored: bool = True
    tag: str | None = None
    failure: str | None = None
    sampling: SamplingDistribution | None = None


@frozen(kw_only=True)
class SessionRecord:
    """A session as it stands: what export, journal and report read. ``interactions`` are in order of request.

    Which reward is the outcome of the episode follows from ``reward_scope`` alone: see ``outcome``.
    """

    id: SessionId
    interactions: tuple[Interaction, ...] = ()
    is_ended: bool = False
    group: GroupId | None = None
    metadata: Mapping[str, Any] = field(factory=dict)
    logged: Mapping[str, float] = field(factory=dict)
    """Named numbers that were logged over HTTP."""
    is_restored: bool = False
    """Whether an earlier process began it, whose last weights may be lost: nobody can compute its tokens again."""

    @property
    def outcome(self) -> Interaction | None:
        """The answer whose reward is the outcome of the episode; ``None`` where rewards are those of answers only.

        That is the last one whose reward was set for the episode. Without such a one, a reward that was set without
        naming an answer is the outcome as long as it is the only reward of the session.
        """
        rewarded = [t for t in self.interactions if t.reward is not None and t.status is InteractionStatus.COMPLETED]
        whole = [turn for turn in rewarded if turn.reward_scope is RewardScope.EPISODE]
        if whole:
            return max(whole, key=lambda turn: (turn.completed_order or 0, turn.order))
        is_only = len(rewarded) == 1 and rewarded[0].reward_scope is RewardScope.LAST
        return rewarded[0] if is_only else None

    @property
    def num_empty_turns(self) -> int:
        """Answers that were completed and hold no token, not even one that ends them."""
        completed = [turn for turn in self.interactions if turn.status is InteractionStatus.COMPLETED]
        return sum(turn.completion is not None and not len(turn.completion.token_ids) for turn in completed)
