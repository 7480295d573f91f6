"""Parent lookup: finds the interaction that a request continues, in time that depends on the new messages only.

The conversational parent is the completed interaction whose messages and answer are the longest prefix of the request's
messages. Completed interactions are kept in buckets by the digest of messages + answer. A request is digested prefix by
prefix, and the longest prefix with a bucket wins. Recent histories are kept with their digests, so that an agent that
continues a conversation costs one comparison per old message and one digest per new one.

Instructions, tools and template options (the ``Frame``) are not part of these digests: if only they changed, the parent
is still found and the reason for the fork is known.

``canonical`` defines when two messages are equal; ``tree`` owns the lifecycle of interactions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import evolve, field, frozen

from areal_actors.cache.canonical import (
    DIGEST_SIZE,
    ROOT_DIGEST,
    extend_digest,
    has_same_calls,
    is_echo,
    message_digest,
    num_leading_instructions,
    options_digest,
    prefix_digests,
    system_digest,
    tools_digest,
)
from areal_actors.cache.history import Lookup, full_history, without_instructions
from areal_actors.domain import ChatMessage, CompletionRequest, ForkReason, Interaction, InteractionId

__all__ = ["Frame", "History", "Match", "ParentIndex"]

_MAX_RECENT = 4  # an agent and a few sub-agents that talk in turns


@frozen
class Frame:
    """Digests of a request's context: instructions, tools and template options."""

    system: bytes
    tools: bytes
    options: bytes


@frozen
class History:
    """The messages of one request, with the digest of each prefix (16 bytes each) and their frame."""

    messages: tuple[ChatMessage, ...]
    digests: bytes
    frame: Frame

    def digest(self, num_messages: int) -> bytes:
        """Return the digest of the first ``num_messages`` messages."""
        return self.digests[(num_messages - 1) * DIGEST_SIZE : num_messages * DIGEST_SIZE] or ROOT_DIGEST


@frozen(kw_only=True)
class Match:
    """The position of a request in the tree.

    ``new_messages`` are those beyond the parent's prompt and answer (all of them without a parent); the first
    ``num_instructions`` of them replace its instructions (``None``: those stay). ``fork_hint`` is the reason why the
    parent's tokens cannot be extended, ``None`` if they may be.
    """

    parent: Interaction | None
    new_messages: tuple[ChatMessage, ...]
    fork_hint: ForkReason | None
    num_instructions: int | None = None
    history: History = field(repr=False)


@frozen(eq=False, weakref_slot=False)
class _Entry:
    """The index entry of an interaction that has an answer."""

    id: InteractionId
    frame: Frame
    num_messages: int


@frozen
class _Recent:
    """A recent history, and the interactions that were requested with exactly it."""

    history: History
    ids: tuple[InteractionId, ...]


@frozen(order=True)
class _Evidence:
    """How certain it is that an answer is the echoed one; among equals, the most recently completed wins."""

    has_same_system: bool
    has_same_calls: bool
    has_same_reasoning: bool
    has_same_frame: bool
    completed_order: int


class ParentIndex:
    """Finds parents among the interactions of one session. Owned by the session's tree."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._asked: dict[InteractionId, tuple[_Entry, bytes]] = {}  # pending ones, with the digest of their prompt
        self._answers: dict[bytes, _Entry | tuple[_Entry, ...]] = {}  # usually one entry; a tuple would cost 64 bytes
        self._prompts: set[bytes] = set()
        self._lengths: dict[bytes, int] | None = None  # made on demand; most sessions never need it
        self._frames: dict[Frame, Frame] = {}
        self._recent: tuple[_Recent, ...] = ()

    def match(self, request: CompletionRequest) -> Match:
        """Find the parent of ``request`` among the completed interactions."""
        history, recent = self._digest(request)
        hint: ForkReason | None = None
        for position in _answer_positions(history.messages):
            entries = self._bucket(history.digest(position + 1))
            parent, reason = self._choose(entries, history, position, recent)
            if parent is not None:
                return _linked(parent, history, position, reason)
            hint = hint or reason or self._edit_reason(history, position)
        hint = hint or self._stray_reason(history.messages) or ForkReason.ROOT
        return Match(parent=None, new_messages=history.messages, fork_hint=hint, history=history)

    def is_asked(self, history: History) -> bool:
        """Return whether exactly these messages were requested before."""
        return history.digest(len(history.messages)) in self._prompts

    def follow(self, request: CompletionRequest, parent: Interaction) -> Match:
        """Return the match of a request that names its completed parent instead of repeating the history."""
        num_own = int(request.has_instructions)
        instructions, new = request.messages[:num_own], request.messages[num_own:]
        said = full_history(parent, self._lookup)[int(parent.has_instructions) :]
        history, _ = self._digest(evolve(request, messages=(*instructions, *said, *new)))
        position = len(history.messages) - len(new) - 1
        frames = [entry.frame for entry in self._bucket(history.digest(position + 1)) if entry.id == parent.id]
        # The stored history differs from the echo that its client sent if the client renamed call ids.
        reason = _frame_reason(frames[0], history.frame) if frames else ForkReason.CLIENT_EDITED_HISTORY
        return _linked(parent, history, position, reason)

    def begin(self, interaction_id: InteractionId, history: History) -> None:
        """Record that ``history`` was requested under this id."""
        digest = history.digest(len(history.messages))
        self._asked[interaction_id] = _Entry(interaction_id, history.frame, len(history.messages)), digest
        self._prompts.add(digest)
        self._remember(history, interaction_id)

    def restore(self, interaction: Interaction, frame: Frame, digest: bytes | None) -> None:
        """Add an interaction that began and ended earlier; ``digest`` is that of its messages as they were sent.

        Without it, the digest of the stored messages is used, which differs if a client renamed the ids of calls.
        """
        messages = full_history(interaction, self._lookup, with_answer=False)
        digest = digest or prefix_digests(messages)[-DIGEST_SIZE:] or ROOT_DIGEST
        self._asked[interaction.id] = (
            _Entry(interaction.id, self._frames.setdefault(frame, frame), len(messages)),
            digest,
        )
        self._prompts.add(digest)
        self.end(interaction.id, interaction.output)

    def end(self, interaction_id: InteractionId, output: ChatMessage | None) -> None:
        """Make the interaction findable by its answer, or by the part of an answer that its client has seen."""
        entry, prompt_digest = self._asked.pop(interaction_id)
        if output is None:
            return
        digest = extend_digest(prompt_digest, output)
        others = self._bucket(digest)
        self._answers[digest] = (*others, entry) if others else entry
        if self._lengths is not None:
            _note_length(self._lengths, entry, output)

    def _bucket(self, digest: bytes) -> tuple[_Entry, ...]:
        """Return the interactions that end with this digest, in the order in which they ended."""
        found = self._answers.get(digest, ())
        return (found,) if isinstance(found, _Entry) else found

    def _digest(self, request: CompletionRequest) -> tuple[History, _Recent | None]:
        """Return the request's history, reusing the digests of the recent history that shares most messages with it."""
        messages = request.messages
        frame = Frame(system_digest(messages), tools_digest(request.tools), options_digest(request.template_kwargs))
        shared, recent = max(
            ((_num_shared(recent.history.messages, messages), recent) for recent in self._recent),
            key=lambda pair: pair[0],
            default=(0, None),
        )
        known = b""
        if recent is not None and shared > num_leading_instructions(messages):
            known = recent.history.digests[: shared * DIGEST_SIZE]
            messages = recent.history.messages[:shared] + messages[shared:]
        history = History(messages, prefix_digests(messages, known=known), self._frames.setdefault(frame, frame))
        is_whole = recent is not None and shared == len(recent.history.messages)
        return history, recent if is_whole else None

    def _choose(
        self, entries: Sequence[_Entry], history: History, position: int, recent: _Recent | None
    ) -> tuple[Interaction | None, ForkReason | None]:
        """Return the best candidate for the answer at ``position``, or the reason why none of them is the parent."""
        reason: ForkReason | None = None
        best: tuple[_Evidence, Interaction, Frame] | None = None
        for entry in entries:
            interaction = self._lookup(entry.id)
            if not self._is_path(entry, interaction, history, position, recent):
                continue
            if interaction.completed_order is None:
                reason = reason or ForkReason.PARENT_UNFINISHED
                continue
            evidence = _weigh(interaction, entry, history, position)
            if not (evidence.has_same_system or self._is_proven(interaction, history, position)):
                reason = ForkReason.NEW_SYSTEM_PROMPT
            elif best is None or evidence > best[0]:
                best = evidence, interaction, entry.frame
        if best is None:
            return None, reason
        return best[1], _frame_reason(best[2], history.frame)

    def _is_path(
        self, entry: _Entry, interaction: Interaction, history: History, position: int, recent: _Recent | None
    ) -> bool:
        """Return whether the messages up to ``position`` echo the interaction's own, message by message."""
        if interaction.output is None or not is_echo(interaction.output, history.messages[position]):
            return False
        if recent is not None and position == len(recent.history.messages) and entry.id in recent.ids:
            return True  # asked with exactly these messages
        stored = without_instructions(full_history(interaction, self._lookup, with_answer=False))
        echoed = without_instructions(history.messages[:position])
        return len(stored) == len(echoed) and all(map(is_echo, stored, echoed))

    def _is_proven(self, interaction: Interaction, history: History, position: int) -> bool:
        """Return whether call ids prove that the history is this interaction's.

        Under other instructions, equal words may be a coincidence; call ids are issued only once.
        """
        stored = without_instructions(full_history(interaction, self._lookup))
        echoed = without_instructions(history.messages[: position + 1])
        return any(s.tool_calls and has_same_calls(s, e) for s, e in zip(stored, echoed, strict=True))

    def _edit_reason(self, history: History, position: int) -> ForkReason | None:
        """Return the reason for an unknown answer after a known prompt: the client edited it."""
        is_known_prompt = position > 0 and history.digest(position) in self._prompts
        return ForkReason.CLIENT_EDITED_HISTORY if is_known_prompt else None

    def _stray_reason(self, messages: Sequence[ChatMessage]) -> ForkReason | None:
        """Return the reason for a known answer after other messages: the client omitted some, or edited one."""
        for position in _answer_positions(messages):
            if self._lengths is None:
                self._lengths = self._measure()
            length = self._lengths.get(message_digest(messages[position]))
            if length is not None:
                is_shorter = position < length
                return ForkReason.HISTORY_TRUNCATED if is_shorter else ForkReason.CLIENT_EDITED_HISTORY
        return None

    def _measure(self) -> dict[bytes, int]:
        """Return the number of messages before each answer, by the digest of the answer on its own."""
        lengths: dict[bytes, int] = {}
        for digest in self._answers:
            for entry in self._bucket(digest):
                output = self._lookup(entry.id).output
                assert output is not None
                _note_length(lengths, entry, output)
        return lengths

    def _remember(self, history: History, interaction_id: InteractionId) -> None:
        same = [recent for recent in self._recent if recent.history.messages == history.messages]
        ids = (*(i for recent in same for i in recent.ids), interaction_id)
        # A longer history replaces its own prefixes, so that the few entries belong to different conversations.
        others = [r for r in self._recent if not _is_prefix(r.history.messages, history.messages)]
        self._recent = (_Recent(history, ids), *others)[:_MAX_RECENT]


def _note_length(lengths: dict[bytes, int], entry: _Entry, output: ChatMessage) -> None:
    """Record the length of the history before an answer; among equal answers, the longest history counts."""
    alone = message_digest(output)
    lengths[alone] = max(entry.num_messages, lengths.get(alone, 0))


def _answer_positions(messages: Sequence[ChatMessage]) -> Iterator[int]:
    return (i for i in range(len(messages) - 1, -1, -1) if messages[i].role == "assistant")


def _num_shared(known: tuple[ChatMessage, ...], messages: tuple[ChatMessage, ...]) -> int:
    """Return the number of messages that both begin with.

    An agent that continues a conversation repeats all of them, so that case is tried first.
    """
    if messages[: len(known)] == known:
        return len(known)
    num_shared = 0
    for left, right in zip(known, messages, strict=False):
        if not (left is right or left == right):
            break
        num_shared += 1
    return num_shared


def _is_prefix(known: tuple[ChatMessage, ...], messages: tuple[ChatMessage, ...]) -> bool:
    """Return whether ``messages`` begins with all of ``known``. The objects are shared then, including the last one."""
    return len(known) <= len(messages) and (not known or known[-1] is messages[len(known) - 1])


def _weigh(interaction: Interaction, entry: _Entry, history: History, position: int) -> _Evidence:
    output, echoed = interaction.output, history.messages[position]
    assert output is not None
    return _Evidence(
        entry.frame.system == history.frame.system,
        has_same_calls(output, echoed),
        (output.reasoning or "") == (echoed.reasoning or ""),
        entry.frame == history.frame,
        interaction.completed_order or 0,
    )


def _frame_reason(parent: Frame, frame: Frame) -> ForkReason | None:
    if parent.system != frame.system:
        return ForkReason.NEW_SYSTEM_PROMPT
    if parent.tools != frame.tools:
        return ForkReason.TOOLS_CHANGED
    if parent.options != frame.options:
        return ForkReason.TEMPLATE_OPTIONS_CHANGED
    return None


def _linked(parent: Interaction, history: History, position: int, reason: ForkReason | None) -> Match:
    new, num_instructions = history.messages[position + 1 :], None
    if reason is ForkReason.NEW_SYSTEM_PROMPT:
        num_instructions = num_leading_instructions(history.messages)
        new = history.messages[:num_instructions] + new
    return Match(parent=parent, new_messages=new, fork_hint=reason, num_instructions=num_instructions, history=history)
