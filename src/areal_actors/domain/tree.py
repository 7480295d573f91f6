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
    session. ``failure`` says why a failed one failed. ``sampling`` is the distribution that the answer is sampled from,
    ``None`` where it is unknown.
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
    is_stored: bool = True
    tag: str | None = None
    failure: str | None = None
    sampling: SamplingDistribution | None = None


@frozen(kw_only=True)
class SessionRecord:
    """A session as it stands: what export, journal and report read. ``interactions`` are in order of request."""

    id: SessionId
    interactions: tuple[Interaction, ...] = ()
    is_ended: bool = False
    group: GroupId | None = None
    metadata: Mapping[str, Any] = field(factory=dict)
    is_restored: bool = False
    """Whether an earlier process began it, whose last weights may be lost: nobody can compute its tokens again."""

    @property
    def num_empty_turns(self) -> int:
        """Answers that were completed and hold no token, not even one that ends them."""
        completed = [turn for turn in self.interactions if turn.status is InteractionStatus.COMPLETED]
        return sum(turn.completion is not None and not len(turn.completion.token_ids) for turn in completed)
