"""The conversation tree of one session: the only mutable owner of its interactions.

Interactions begin, and then complete, are cancelled or fail, each exactly once. Completed ones can be rewarded and can
become parents. All values that leave the tree are frozen. The tree stores suffixes only: the part that an interaction
shares with its parents is found by walking to the root.

``links`` finds the parent, ``prompts`` plans the tokens of a prompt, and ``rewards`` propagates rewards. The tree never
waits and has no clock; the actor that owns it serialises access.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from operator import itemgetter
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from areal_actors.cache.history import full_history, full_ids, prompt_ids
from areal_actors.cache.links import Frame, Match, ParentIndex
from areal_actors.domain import (
    ChatMessage,
    Completion,
    CompletionRequest,
    ForkReason,
    GroupId,
    Interaction,
    InteractionId,
    InteractionStatus,
    Ints,
    RewardScope,
    SamplingDistribution,
    SessionId,
    SessionRecord,
    TurnEnded,
    as_ints,
    digest_tokens,
    digest_turn,
)
from areal_actors.errors import Conflict, InvalidRequest, NotFound, PreviousNotFound, RewardError

RAW_ROLE = "prompt"
"""The role of a raw prompt in a history. Conversations never use it, so none is taken to continue a raw prompt."""

_CALL_ID_BYTES = 4
_UNREWARDABLE = frozenset({InteractionStatus.CANCELLED, InteractionStatus.FAILED})
_LARGEST_FLOAT32 = float.fromhex("0x1.fffffep+127")
"""The largest float32."""


@frozen(kw_only=True)
class PromptPlan:
    """The prompt of a request, and its position in the tree.

    ``token_ids`` int32 [T] is the whole prompt, ``suffix`` its part beyond the token parent's prompt and output.
    ``fork`` is the reason why the tokens of the answer that the client continues are not extended, ``None`` if they
    are. ``beginning`` int32 [n] is the end of the prompt that is the beginning of the answer, which the client wrote.
    """

    request: CompletionRequest = field(repr=False)
    match: Match = field(repr=False)
    token_ids: Ints = field(eq=False, repr=False)
    suffix: Ints = field(eq=False, repr=False)
    token_parent: InteractionId | None
    fork: ForkReason | None
    beginning: Ints = field(factory=lambda: as_ints([]), eq=False, repr=False)

    @property
    def parent(self) -> InteractionId | None:
        """The conversational parent."""
        return None if self.match.parent is None else self.match.parent.id

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The messages beyond the conversational parent's, or beyond the first of those that the client kept."""
        return self.match.new_messages


class ConversationTree:
    """The interactions of one session, by id, in order of request."""

    def __init__(
        self,
        session: SessionId,
        *,
        group: GroupId | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.session = session
        self.group = group
        self.metadata: Mapping[str, Any] = dict(metadata or {})
        self.logged: Mapping[str, float] = {}
        """Named numbers of the session, replaced as a whole."""
        self._interactions: dict[InteractionId, Interaction] = {}
        # Without an error message, for ids that the tree itself stored.
        self._known = self._interactions.__getitem__
        self._index = ParentIndex(self._known)
        self._call_ids: set[str] = set()
        """Of the calls in all answers."""
        self._next_order = 0
        self._next_completed = 0
        self._num_pending = 0
        self._is_restored = False
        self._last_completed: InteractionId | None = None
        self._last_stored: InteractionId | None = None

    @classmethod
    def restore(
        cls,
        session: SessionId,
        turns: Iterable[TurnEnded],
        *,
        group: GroupId | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> ConversationTree:
        """Return the tree in which ``turns`` have ended, in this order.

        Requests that were pending are treated as never made.

        Requests are numbered on from the latest of them, so that the order of one that was lost is skipped or given to
        the next.
        """
        tree, ended = cls(session, group=group, metadata=metadata), tuple(turns)
        tree._is_restored = True
        for turn in sorted(ended, key=lambda turn: turn.interaction.order):
            restored = turn.interaction
            completion = None if restored.completion is None else compact(restored.completion)
            if restored.output is not None:
                tree._call_ids.update(call.id for call in restored.output.tool_calls)
            tree._put(evolve(restored, prompt_suffix=own(restored.prompt_suffix), completion=completion))
            tree._next_order = turn.interaction.order + 1
        # In the order in which they ended, which decides between equal answers.
        for turn in ended:
            interaction = tree._known(turn.interaction.id)
            if turn.frame is not None:
                tree._index.restore(interaction, Frame(*turn.frame), turn.prompt_digest)
            if interaction.completed_order is not None:
                tree._next_completed = max(tree._next_completed, interaction.completed_order + 1)
                tree._note_completed(interaction)
        return tree

    def __len__(self) -> int:
        """Return the number of interactions, finished or not."""
        return len(self._interactions)

    def __iter__(self) -> Iterator[Interaction]:
        """Iterate over the interactions in order of request."""
        return iter(self._interactions.values())

    @property
    def num_pending(self) -> int:
        """The number of interactions that have begun and not ended."""
        return self._num_pending

    def get(self, interaction_id: InteractionId) -> Interaction:
        """Return the interaction's current state. Raises ``NotFound`` for an unknown id."""
        try:
            return self._interactions[interaction_id]
        except KeyError:
            raise NotFound(
                f"Session {self.session} has no interaction {interaction_id}; use the id of an answer that it gave."
            ) from None

    # ------------------------------------------------------------------------------------------- looking

    def match(self, request: CompletionRequest) -> Match:
        """Find the interaction that ``request`` continues, by its history or by the id that it gives.

        Raises ``PreviousNotFound`` if the id is not in this session, and ``InvalidRequest`` if that interaction has no
        answer to follow.
        """
        if request.previous is None:
            return self._index.match(request)
        previous = self._interactions.get(request.previous)
        if previous is None:
            raise PreviousNotFound(request.previous)
        if previous.status is not InteractionStatus.COMPLETED:
            raise InvalidRequest(
                f"Response {previous.id} was not completed ({previous.status}), so that nothing can follow it; "
                "send the history as input.",
                param=PreviousNotFound.field,
            )
        return self._index.follow(request, previous)

    def find_text(self, text: str) -> tuple[Interaction, str] | None:
        """Return the longest answered raw prompt whose text and answer begin ``text``, and the rest."""
        known = ((turn, "".join(message.content or "" for message in self.history(turn))) for turn in self._raw())
        # Without a text, every later use of the same prompt would seem to continue an empty answer.
        begun = [(turn, said) for turn, said in known if turn.output and turn.output.content and text.startswith(said)]
        found = max(begun, key=lambda each: len(each[1]), default=None)
        return None if found is None else (found[0], text[len(found[1]) :])

    def find_ids(self, token_ids: Ints) -> tuple[Interaction, Ints] | None:
        """Return the longest answered raw prompt whose exact ids begin ``token_ids`` (int32 [T]), and the rest."""
        known = ((turn, self.full_tokens(turn)) for turn in self._raw())
        begun = [(turn, len(ids)) for turn, ids in known if np.array_equal(ids, token_ids[: len(ids)])]
        found = max(begun, key=itemgetter(1), default=None)
        return None if found is None else (found[0], token_ids[found[1] :])

    def _raw(self) -> list[Interaction]:
        """Return the answered raw prompts, the last ones first, which decide between equal ones."""
        raw = (turn for turn in self if turn.messages and turn.messages[-1].role == RAW_ROLE)
        answered = [turn for turn in raw if turn.completed_order is not None]
        return sorted(answered, key=lambda turn: turn.completed_order or 0, reverse=True)

    def history(self, interaction: Interaction) -> tuple[ChatMessage, ...]:
        """Return all stored messages of an interaction, its answer last."""
        return full_history(interaction, self._known)

    def prompt_tokens(self, interaction: Interaction) -> Ints:
        """Return the exact ids of the prompt, int32 [T]."""
        return prompt_ids(interaction, self._known)

    def full_tokens(self, interaction: Interaction) -> Ints:
        """Return the exact ids of the prompt and the sampled output, int32 [T]."""
        return full_ids(interaction, self._known)

    def snapshot(self, *, is_ended: bool = False) -> SessionRecord:
        """Return the session's current state as a frozen record."""
        return SessionRecord(
            id=self.session,
            interactions=tuple(self._interactions.values()),
            is_ended=is_ended,
            group=self.group,
            metadata=self.metadata,
            logged=self.logged,
            is_restored=self._is_restored,
        )

    # ----------------------------------------------------------------------------------------- lifecycles

    def begin(
        self,
        interaction_id: InteractionId,
        plan: PromptPlan,
        *,
        sampling: SamplingDistribution | None = None,
        tag: str | None = None,
    ) -> Interaction:
        """Add a pending interaction. Several may begin with one plan (the choices of ``n > 1``).

        ``sampling`` is the distribution that the engine is asked to sample from, and ``tag`` the role of the key that
        came with the request; by default, both are those of the request.

        Raises ``Conflict`` if the id is taken.
        """
        if interaction_id in self._interactions:
            raise Conflict(f"Session {self.session} already has an interaction {interaction_id}; choose another id.")
        is_asked_again = plan.fork is ForkReason.ROOT and self._index.is_asked(plan.match)
        interaction = Interaction(
            id=interaction_id,
            order=self._next_order,
            parent=plan.parent,
            token_parent=plan.token_parent,
            fork=ForkReason.SIBLING if is_asked_again else plan.fork,
            messages=plan.messages,
            num_instructions=plan.match.num_instructions,
            num_kept=plan.match.num_kept,
            has_instructions=plan.request.has_instructions,
            prompt_suffix=own(plan.suffix),
            num_prompt_tokens=len(plan.token_ids),
            is_stored=plan.request.store,
            tag=plan.request.tag if tag is None else tag,
            sampling=plan.request.sampling.distribution() if sampling is None else sampling,
        )
        self._index.begin(interaction_id, plan.match)
        self._num_pending += 1
        self._next_order += 1
        return self._put(interaction)

    def complete(self, interaction_id: InteractionId, completion: Completion, output: ChatMessage) -> Interaction:
        """Record the answer: ``completion`` as it was sampled, ``output`` as the client reads it.

        Raises ``NotFound`` for an unknown id and ``Conflict`` if the interaction has ended already.
        """
        return self.record(self.prepare(interaction_id, completion, output))

    def issue_call_id(self, wanted: str) -> str:
        """Return the id of a call in an answer: ``wanted``, or a longer one if the session has a call of that id.

        Some models write ids themselves, and write them again in other conversations. An id that is unique tells whose
        answer an edited history continues.
        """
        issued = wanted
        while issued in self._call_ids:
            issued = f"{wanted}__{secrets.token_hex(_CALL_ID_BYTES)}"
        self._call_ids.add(issued)
        return issued

    def prepare(self, interaction_id: InteractionId, completion: Completion, output: ChatMessage) -> Interaction:
        """Return the completed interaction, which stays pending in the tree until it is recorded.

        Raises as ``complete`` does.
        """
        order, self._next_completed = self._next_completed, self._next_completed + 1
        pending, known = self._pending(interaction_id), compact(completion)
        if completion.routed_experts is not None:
            # The ancestors have those of their own tokens, except for the last one, which was not computed there.
            num_own = len(pending.prompt_suffix) + len(completion.token_ids) - (pending.token_parent is None)
            known = evolve(known, routed_experts=own(completion.routed_experts[-num_own:]))
        tokens = digest_tokens(np.concatenate([self.prompt_tokens(pending), known.token_ids]))
        return evolve(
            pending,
            completion=known,
            digest=digest_turn(pending.id, tokens, known),
            output=output,
            status=InteractionStatus.COMPLETED,
            completed_order=order,
        )

    def record(self, interaction: Interaction) -> Interaction:
        """Replace the pending interaction by a prepared one. Raises as ``complete`` does."""
        self._pending(interaction.id)
        self._end(interaction)
        self._note_completed(interaction)
        return interaction

    def _note_completed(self, interaction: Interaction) -> None:
        self._last_completed = interaction.id
        if interaction.is_stored:
            self._last_stored = interaction.id

    def cancel(
        self, interaction_id: InteractionId, partial: Completion | None = None, output: ChatMessage | None = None
    ) -> Interaction:
        """Record that the client disconnected; ``partial`` is the sampled part, ``output`` the part it has read.

        A cancelled interaction is never trained and never a parent. Raises as ``complete`` does.
        """
        completion = None if partial is None else compact(partial)
        pending = self._pending(interaction_id)
        return self._end(evolve(pending, completion=completion, output=output, status=InteractionStatus.CANCELLED))

    def fail(self, interaction_id: InteractionId, reason: str, partial: Completion | None = None) -> Interaction:
        """Record why there is no answer; ``partial`` is the sampled part. Raises as ``complete`` does."""
        completion = None if partial is None else compact(partial)
        pending = self._pending(interaction_id)
        return self._end(evolve(pending, completion=completion, failure=reason, status=InteractionStatus.FAILED))

    def _pending(self, interaction_id: InteractionId) -> Interaction:
        interaction = self.get(interaction_id)
        if interaction.status is not InteractionStatus.PENDING:
            raise Conflict(f"Interaction {interaction_id} is {interaction.status} already; it ends once.")
        return interaction

    def _end(self, interaction: Interaction) -> Interaction:
        self._num_pending -= 1
        self._index.end(interaction.id, interaction.output)
        return self._put(interaction)

    def _put(self, interaction: Interaction) -> Interaction:
        self._interactions[interaction.id] = interaction
        return interaction

    # -------------------------------------------------------------------------------------------- rewards

    def set_reward(self, interaction_id: InteractionId | None, reward: Any, *, is_outcome: bool = False) -> Interaction:
        """Assign a reward to one interaction, or to the last completed one, replacing an earlier reward.

        ``reward`` is a finite number: float, int, bool, or a numpy or torch scalar. Without an id, interactions that
        the client asked not to store are skipped, unless there are no others. A pending interaction keeps its reward
        until it completes.

        With ``is_outcome``, a reward without an id is the outcome of the episode, even if others have rewards; it stays
        the outcome when another number without an id replaces it.

        Raises ``NotFound`` for an unknown id; ``RewardError`` if ``reward`` is not such a number, if nothing has
        completed yet, or if the interaction was cancelled or has failed.
        """
        return self.put_reward(self.rewarded(interaction_id, reward, is_outcome=is_outcome))

    def rewarded(self, interaction_id: InteractionId | None, reward: Any, *, is_outcome: bool = False) -> Interaction:
        """Return the interaction with the reward that ``set_reward`` would assign, without changing it.

        Raises as it does.
        """
        value = parse_reward(reward)
        last = self._last_stored or self._last_completed
        if interaction_id is not None:
            interaction = self.get(interaction_id)
        elif last is not None:
            interaction = self._interactions[last]
        else:
            raise RewardError(
                f"Session {self.session} has no completed interaction to reward; wait for an answer, or name one by id."
            )
        if interaction.status in _UNREWARDABLE:
            raise RewardError(
                f"Interaction {interaction.id} was not completed ({interaction.status}) and is not trained; "
                "reward a completed one."
            )
        if interaction_id is not None:
            scope = RewardScope.ANSWER
        elif is_outcome or interaction.reward_scope is RewardScope.EPISODE:
            scope = RewardScope.EPISODE
        else:
            scope = RewardScope.LAST
        return evolve(interaction, reward=value, reward_scope=scope)

    def put_reward(self, rewarded: Interaction) -> Interaction:
        """Store the reward of ``rewarded`` on the current state of that interaction."""
        # The interaction may have completed while the journal wrote the reward, so ``rewarded`` may be out of date.
        now = self.get(rewarded.id)
        return self._put(evolve(now, reward=rewarded.reward, reward_scope=rewarded.reward_scope))


def own(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a read-only copy, which keeps no larger buffer alive."""
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def compact(completion: Completion) -> Completion:
    """Return the same completion in arrays of its own."""
    sampled, raw = completion.logprobs, completion.raw_logprobs
    logprobs = own(sampled)
    # The two are the same without truncation and penalties, and are then stored once.
    is_same = raw is sampled or sampled.tobytes() == raw.tobytes()
    return evolve(
        completion,
        token_ids=own(completion.token_ids),
        logprobs=logprobs,
        raw_logprobs=logprobs if is_same else own(raw),
        versions=own(completion.versions),
    )


def parse_reward(value: Any) -> float:
    """Return a reward as a float that fits into a float32, which training uses.

    Accepts a float, int, bool, or numpy or torch scalar. Raises ``RewardError`` for everything else: text, ``None``,
    arrays, NaN, infinities and numbers that a float32 cannot hold.
    """
    scalar = to_scalar(value)
    if not isinstance(scalar, Real):
        raise RewardError(f"A reward must be a number, not {type(value).__name__}: {_shorten(value)}.")
    try:
        reward = float(scalar)
    except (OverflowError, ValueError):
        raise RewardError(f"A reward must fit into a float: {_shorten(value)} does not.") from None
    if not math.isfinite(reward):
        raise RewardError(f"A reward must be finite, not {reward}; check what computed it.")
    if not fits_float32(reward):
        raise RewardError(f"A reward must fit into a float32, which training has: {reward} does not; scale it down.")
    return reward


def fits_float32(value: float) -> bool:
    """Return whether the value is finite as a float32. NaN is not."""
    return abs(value) <= _LARGEST_FLOAT32


def to_scalar(value: Any) -> Any:
    """Return the Python scalar within a numpy or torch scalar."""
    item = getattr(value, "item", None)
    if isinstance(value, Real) or not callable(item):
        return value
    try:
        return item()
    except (TypeError, ValueError, RuntimeError):
        raise RewardError(f"A reward must be one number, not a {type(value).__name__} of several.") from None


def _shorten(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
