"""Conversation trees: the record of each request of a session and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NewType

from attrs import field, frozen

from areal_actors.domain.chat import ChatMessage, InteractionId, SessionId
from areal_actors.domain.sampling import Completion, Ints, SamplingDistribution, array_equality, as_ints

GroupId = NewType("GroupId", str)


class InteractionStatus(StrEnum):
    """The progress of an interaction. Only completed ones are trained by default."""

    PENDING = "pending"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class ForkReason(StrEnum):
    """Reasons why a turn does not extend the exact tokens of the turn before it."""

    ROOT = "root"
    """Its history contains no answer of this session."""
    SIBLING = "sibling"
    """The prompt of another root was asked again."""
    TEMPLATE_REWROTE_HISTORY = "template_rewrote_history"
    CLIENT_EDITED_HISTORY = "client_edited_history"
    """The client changed an answer, or put one there that this session never gave."""
    HISTORY_TRUNCATED = "history_truncated"
    """The client omitted earlier messages and kept an answer of this session."""
    NEW_SYSTEM_PROMPT = "new_system_prompt"
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_OPTIONS_CHANGED = "template_options_changed"
    PARENT_UNFINISHED = "parent_unfinished"


class RewardScope(StrEnum):
    """The target of a reward. The reward itself is always stored on one answer."""

    ANSWER = "answer"
    """One answer, named by its id."""
    LAST = "last"
    """The last completed answer: the outcome of the episode while no other answer has a reward."""
    EPISODE = "episode"
    """The whole episode: the agent's return value, or the final reward of ``finalize``."""


@frozen(kw_only=True)
class Interaction:
    """One request and its answer within a session's tree.

    There are two parents: ``parent`` is the turn whose answer this one continues, and carries rewards; ``token_parent``
    is the one whose exact tokens are a prefix of this prompt, and carries packing and KV reuse. A fork has the first
    without the second, and its reason in ``fork``. ``prompt_suffix`` holds the prompt ids beyond the token parent's
    prompt and output (the whole prompt without a token parent). ``messages`` are those beyond the conversational
    parent's prompt and answer (all of them for a root); the first ``num_instructions`` of them replace the parent's
    leading instructions (``None``: those stay). If the client edited the parent's history, they follow only its first
    ``num_kept`` messages (``None``: all of them). With ``has_instructions``, the first message of the whole history
    applied to this request alone. ``order`` counts requests, ``completed_order`` counts completions in a session.
    ``reward`` is the number that was set, ``reward_scope`` its target. ``failure`` is the reason of a failed
    interaction. ``sampling`` is the distribution that the answer is sampled from, ``None`` if unknown. ``digest`` binds
    a completed answer to its tokens (see ``domain.digests``); ``None`` in records of earlier releases.
    """

    id: InteractionId
    order: int
    parent: InteractionId | None = None
    token_parent: InteractionId | None = None
    fork: ForkReason | None = None
    messages: tuple[ChatMessage, ...] = ()
    num_instructions: int | None = None
    num_kept: int | None = None
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
    digest: str | None = None


def _at_least_one(_: object, attribute: Any, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"'{attribute.name}' must be >= 1: {value}")


@frozen(kw_only=True)
class EpisodeLimits:
    """The most that the model answers in an episode. Calls of roles that are not trained do not count.

    A request beyond a limit is refused with status 400 (episode_limit_reached). An agent that ends all the same is
    rewarded as always, and a grader grades what it has left.
    """

    max_turns: int | None = field(default=None, validator=_at_least_one)
    """Answers of an episode; each of the n answers of a request counts."""
    max_sampled_tokens: int | None = field(default=None, validator=_at_least_one)
    """Tokens that are sampled in an episode. The answer that would exceed it is cut, as at its own limit; requests that
    are answered at the same time are each given what is left."""
    reward: float | None = None
    """The reward of an episode that fails after a request was refused, instead of its failure: its turns are trained.
    null: it is a failed episode."""


@frozen(kw_only=True)
class SessionRecord:
    """The current state of a session, as read by export, journal and report. ``interactions`` are in order of request.

    The outcome of the episode follows from ``reward_scope`` alone: see ``outcome``.
    """

    id: SessionId
    interactions: tuple[Interaction, ...] = ()
    is_ended: bool = False
    group: GroupId | None = None
    metadata: Mapping[str, Any] = field(factory=dict)
    logged: Mapping[str, float] = field(factory=dict)
    """Named numbers that were logged over HTTP."""
    is_restored: bool = False
    """Whether an earlier process began it. Its last weights may be lost, so its tokens may not be recomputable."""
    limit: str | None = None
    """The limit of its episode that refused a request, such as ``max_turns``."""

    @property
    def outcome(self) -> Interaction | None:
        """The answer whose reward is the outcome of the episode; ``None`` if rewards belong to single answers only.

        It is the last answer whose reward was set for the episode. Otherwise, a reward that was set without naming an
        answer is the outcome as long as it is the only reward of the session.
        """
        rewarded = [t for t in self.interactions if t.reward is not None and t.status is InteractionStatus.COMPLETED]
        whole = [turn for turn in rewarded if turn.reward_scope is RewardScope.EPISODE]
        if whole:
            return max(whole, key=lambda turn: (turn.completed_order or 0, turn.order))
        is_only = len(rewarded) == 1 and rewarded[0].reward_scope is RewardScope.LAST
        return rewarded[0] if is_only else None

    @property
    def num_empty_turns(self) -> int:
        """The number of answers that were completed without any token, not even one that ends them."""
        completed = [turn for turn in self.interactions if turn.status is InteractionStatus.COMPLETED]
        return sum(turn.completion is not None and not len(turn.completion.token_ids) for turn in completed)
