"""Parent lookup: finds the interaction that a request continues.

The conversational parent is the completed interaction whose messages and answer are the longest prefix of the request's
messages. Completed interactions are kept in buckets by the digest of messages + answer. A request is digested prefix by
prefix (about 5 µs a message), and the longest prefix with a bucket wins.

Some clients edit the echo of an answer: they add default arguments to its calls, or their own words to its text. Such
an answer is found by

1. the ids of its calls, or of their results: ids are issued once, so they name it even if everything else has changed;
2. its prompt, if that was answered once: nothing else can have been said there;
3. the questions and tool results before it, if exactly one request had these: a client that edits each echo anew on
   every request leaves nothing else as it was;
4. its own words and the question before it, if it was given once: the client has omitted or moved what came before;
5. an answer that was found in one of these ways, if it follows that one in the same words, and no other does.

The edited answer is a parent for rewards only (``Match.num_kept``): its sampled tokens are not what the client sends,
so the prompt extends the tokens of the last answer before it that was echoed faithfully (``Match.base``). Where none
of these decides, the parent is that earlier answer, and the fork says why.

Instructions, tools and template options (the ``Frame``) are not part of these digests: if only they changed, the parent
is still found and the reason for the fork is known.

``history`` defines when two messages are equal; ``tree`` owns the lifecycle of interactions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import starmap, takewhile

from attrs import evolve, field, frozen

from areal_actors.cache.history import (
    DIGEST_SIZE,
    ROOT_DIGEST,
    Lookup,
    calls_of,
    extend_digest,
    full_history,
    has_same_calls,
    is_echo,
    message_digest,
    num_leading_instructions,
    options_digest,
    prefix_digests,
    says_the_same,
    system_digest,
    tools_digest,
    without_instructions,
)
from areal_actors.domain import (
    ChatMessage,
    CompletionRequest,
    ForkReason,
    Interaction,
    InteractionId,
    InteractionStatus,
)


@frozen
class Frame:
    """Digests of a request's context: instructions, tools and template options."""

    system: bytes
    tools: bytes
    options: bytes


@frozen(kw_only=True)
class Match:
    """A request's messages, and their position in the tree.

    ``digests`` has the digest of each prefix of ``messages`` (16 bytes each).
    ``new_messages`` are those beyond the parent's prompt and answer, or beyond the first ``num_kept`` messages of these
    if the client edited them (all of them without a parent); the first ``num_instructions`` of them replace its
    instructions (``None``: those stay). ``fork_hint`` is the reason why the request does not extend the answer that it
    continues, ``None`` if it may.
    ``base`` is the interaction whose tokens may be extended, by the last ``num_beyond`` messages of the request: the
    parent, an earlier one if the parent's answer was edited, or ``None``.
    """

    messages: tuple[ChatMessage, ...] = field(repr=False)
    digests: bytes = field(repr=False)
    frame: Frame = field(repr=False)
    new_messages: tuple[ChatMessage, ...]
    parent: Interaction | None = None
    fork_hint: ForkReason | None = None
    num_instructions: int | None = None
    num_kept: int | None = None
    base: Interaction | None = None
    num_beyond: int = 0

    @property
    def is_fallback(self) -> bool:
        """Whether the parent is an earlier answer than the one that the request continues, which is not known."""
        return self.base is not None and self.base is self.parent and self.fork_hint is not None

    def digest(self, num_messages: int) -> bytes:
        """Return the digest of the first ``num_messages`` messages."""
        return self.digests[(num_messages - 1) * DIGEST_SIZE : num_messages * DIGEST_SIZE] or ROOT_DIGEST

    def linked(
        self, parent: Interaction, position: int, reason: ForkReason | None, hint: ForkReason | None = None
    ) -> Match:
        """Return the match of a faithful echo of the answer of ``parent`` at ``position``.

        ``reason`` is why its tokens cannot be extended, ``hint`` why an answer after it is not the parent.
        """
        new, num_instructions = self.messages[position + 1 :], None
        if reason is ForkReason.NEW_SYSTEM_PROMPT:
            num_instructions = num_leading_instructions(self.messages)
            new = self.messages[:num_instructions] + new
        return evolve(
            self,
            parent=parent,
            new_messages=new,
            fork_hint=reason or hint,
            num_instructions=num_instructions,
            base=parent if reason is None else None,
            num_beyond=len(self.messages) - position - 1,
        )


@frozen(eq=False)
class _Entry:
    """The index entry of an interaction that has an answer."""

    id: InteractionId
    frame: Frame
    num_messages: int


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
        # Pending ones, with the digest of their prompt.
        self._asked: dict[InteractionId, tuple[_Entry, bytes]] = {}
        # By digest, in the order in which they were added.
        self._answers: defaultdict[bytes, list[_Entry]] = defaultdict(list)
        self._prompts: defaultdict[bytes, list[_Entry]] = defaultdict(list)
        self._entries: list[_Entry] = []
        # What is left when a client has edited its history: call ids, the text alone, the questions.
        self._issued: dict[str, _Entry | None] = {}
        self._given: defaultdict[bytes, list[_Entry]] = defaultdict(list)
        self._alike: defaultdict[bytes, list[_Entry]] = defaultdict(list)
        self._num_alike = 0

    def match(self, request: CompletionRequest) -> Match:
        """Find the parent of ``request`` among the completed interactions."""
        asked = _digest(request)
        messages = asked.messages
        edited: tuple[_Entry, int] | None = None
        hint: ForkReason | None = None
        has_foreign = False
        for position in _answer_positions(messages):
            parent, reason = self._choose(asked, position)
            if edited is not None:
                # The parent is known; only a faithful echo before it is missing, whose tokens can be extended.
                if parent is not None and reason is None and self._is_ancestor(parent, edited[0]):
                    return self._edited(*edited, asked, base=(parent, position))
                continue
            issuer = self._issuer(messages, position, parent)
            if parent is not None and (issuer is None or issuer.id == parent.id):
                hint = hint or (ForkReason.CLIENT_EDITED_HISTORY if has_foreign else None)
                return asked.linked(parent, position, reason, hint)
            # An answer at the very end is the beginning of the next one, written by the client, and no echo.
            if position + 1 < len(messages):
                has_foreign = True
                if reason is not ForkReason.PARENT_UNFINISHED:
                    origin = issuer or self._answered_once(asked, position) or self._given_once(asked, position)
                    if origin is not None and self._lookup(origin.id).completed_order is not None:
                        edited = self._follow_faithful(origin, position, messages)
                        continue
                    reason = reason or (None if origin is None else ForkReason.PARENT_UNFINISHED)
            hint = hint or reason
            if position and asked.digest(position) in self._prompts:
                # An unknown answer to a known prompt.
                hint = hint or ForkReason.CLIENT_EDITED_HISTORY
        if edited is not None:
            return self._edited(*edited, asked, base=None)
        # A known answer after other messages: the client omitted some, or edited one.
        strays = (
            (position, self._given.get(message_digest(messages[position]), ()))
            for position in _answer_positions(messages)
        )
        known = ((position, max(entry.num_messages for entry in given)) for position, given in strays if given)
        hint = hint or next(starmap(_edit_or_truncation, known), None)
        return asked if hint is None else evolve(asked, fork_hint=hint)

    def is_asked(self, asked: Match) -> bool:
        """Return whether exactly these messages were requested before."""
        return asked.digest(len(asked.messages)) in self._prompts

    def follow(self, request: CompletionRequest, parent: Interaction) -> Match:
        """Return the match of a request that names its completed parent instead of repeating the history."""
        num_own = int(request.has_instructions)
        instructions, new = request.messages[:num_own], request.messages[num_own:]
        said = full_history(parent, self._lookup)[int(parent.has_instructions) :]
        asked = _digest(evolve(request, messages=(*instructions, *said, *new)))
        position = len(asked.messages) - len(new) - 1
        ended = self._answers.get(asked.digest(position + 1), ())
        frames = [entry.frame for entry in ended if entry.id == parent.id]
        # The stored history differs from the echo that its client sent if the client renamed call ids.
        reason = _frame_reason(frames[0], asked.frame) if frames else ForkReason.CLIENT_EDITED_HISTORY
        return asked.linked(parent, position, reason)

    def begin(self, interaction_id: InteractionId, asked: Match) -> None:
        """Record that these messages were requested under this id."""
        num_messages = len(asked.messages)
        self._ask(_Entry(interaction_id, asked.frame, num_messages), asked.digest(num_messages))

    def restore(self, interaction: Interaction, frame: Frame, digest: bytes | None) -> None:
        """Add an interaction that began and ended earlier; ``digest`` is that of its messages as they were sent.

        Without it, the digest of the stored messages is used, which differs if a client renamed the ids of calls.
        """
        messages = full_history(interaction, self._lookup, with_answer=False)
        digest = digest or prefix_digests(messages)[-DIGEST_SIZE:] or ROOT_DIGEST
        self._ask(_Entry(interaction.id, frame, len(messages)), digest)
        self.end(interaction.id, interaction.output)

    def _ask(self, entry: _Entry, prompt_digest: bytes) -> None:
        self._asked[entry.id] = entry, prompt_digest
        self._prompts[prompt_digest].append(entry)
        self._entries.append(entry)

    def end(self, interaction_id: InteractionId, output: ChatMessage | None) -> None:
        """Make the interaction findable by its answer, or by the part of an answer that its client has seen."""
        entry, prompt_digest = self._asked.pop(interaction_id)
        if output is None:
            return
        self._answers[extend_digest(prompt_digest, output)].append(entry)
        self._given[message_digest(output)].append(entry)
        for call in output.tool_calls:
            # The tree issues no id twice; an id of two answers would tell nothing.
            self._issued[call.id] = entry if self._issued.setdefault(call.id, entry) is entry else None

    def _choose(self, asked: Match, position: int) -> tuple[Interaction | None, ForkReason | None]:
        """Return the best candidate for the answer at ``position``, or the reason why none of them is the parent."""
        reason: ForkReason | None = None
        best: tuple[_Evidence, Interaction, Frame] | None = None
        for entry in self._answers.get(asked.digest(position + 1), ()):
            interaction = self._lookup(entry.id)
            if interaction.output is None:
                continue
            stored = without_instructions(full_history(interaction, self._lookup))
            echoed = without_instructions(asked.messages[: position + 1])
            if len(stored) != len(echoed) or not all(map(is_echo, stored, echoed)):
                continue
            if interaction.completed_order is None:
                reason = reason or ForkReason.PARENT_UNFINISHED
                continue
            evidence = _Evidence(
                entry.frame.system == asked.frame.system,
                has_same_calls(interaction.output, asked.messages[position]),
                (interaction.output.reasoning or "") == (asked.messages[position].reasoning or ""),
                entry.frame == asked.frame,
                interaction.completed_order,
            )
            is_proven = evidence.has_same_system
            if not is_proven:
                # Under other instructions, equal words may be a coincidence; call ids are issued only once.
                is_proven = any(s.tool_calls and has_same_calls(s, e) for s, e in zip(stored, echoed, strict=True))
            if not is_proven:
                reason = ForkReason.NEW_SYSTEM_PROMPT
            elif best is None or evidence > best[0]:
                best = evidence, interaction, entry.frame
        if best is None:
            return None, reason
        return best[1], _frame_reason(best[2], asked.frame)

    def _issuer(self, messages: Sequence[ChatMessage], position: int, parent: Interaction | None) -> _Entry | None:
        """Return the interaction that issued the call ids of the echo at ``position``, if exactly one did.

        ``parent`` is a faithful match, which has most answers' ids and needs no proof.
        """
        ids = [call.id for call in calls_of(messages[position])]
        if not ids:
            # The client may have dropped the calls: then their results name ids that are nowhere in the history.
            results = takewhile(lambda message: message.role == "tool", messages[position + 1 :])
            answered = [message.tool_call_id for message in results if message.tool_call_id]
            called = {call.id for message in messages[:position] for call in message.tool_calls} if answered else ()
            ids = [name for name in answered if name not in called]
        # Claude Code adds replace_all: false to the arguments of its own calls, the AI SDK fills in defaults of a
        # schema: such an echo matches no answer word for word, but keeps the ids.
        output = None if parent is None else parent.output
        if not ids or (output is not None and {call.id for call in output.tool_calls}.issuperset(ids)):
            return None
        found = {entry for name in ids if (entry := self._issued.get(name)) is not None}
        return found.pop() if len(found) == 1 else None

    def _answered_once(self, asked: Match, position: int) -> _Entry | None:
        """Return the only interaction that can have been answered at ``position``: by the prompt, or its questions."""
        entries: Sequence[_Entry] = self._prompts.get(asked.digest(position), ())
        if not entries:
            # The questions are compared only if this prompt was never asked: a prompt that was asked and has several
            # answers, or none, is certain not to be another one.
            entries = self._asked_alike(asked.messages[:position])
        same = []
        for entry in entries:
            interaction = self._lookup(entry.id)
            # A request that ended without an answer does not count, since its client asks again; one that is still
            # pending does.
            has_answer = interaction.output is not None or interaction.status is InteractionStatus.PENDING
            if has_answer and entry.frame.system == asked.frame.system:
                same.append(entry)
        if len(same) > 1:
            # Digests leave call ids out; two sub-agents that heard the same are told apart by theirs.
            ids = _call_ids(asked.messages[:position])
            same = [
                entry
                for entry in same
                if ids == _call_ids(full_history(self._lookup(entry.id), self._lookup, with_answer=False))
            ]
        return same[0] if len(same) == 1 else None

    def _given_once(self, asked: Match, position: int) -> _Entry | None:
        """Return the only interaction that gave the answer at ``position``, if the question before it is the same."""
        # aider puts the present text of its files before the last question, and adds a reminder to it, which is gone in
        # the next request (and two blanks are added if it is restarted): no prompt of a conversation is ever repeated,
        # but each answer stays behind its question. Other clients send the last few turns only.
        question, answer = asked.messages[max(position - 1, 0)], asked.messages[position]
        given = self._given.get(message_digest(answer), ())
        if len(given) != 1 or given[0].frame.system != asked.frame.system:
            return None
        *prompt, output = full_history(self._lookup(given[0].id), self._lookup)
        known = next((message for message in reversed(prompt) if message.role in ("user", "tool")), None)
        if known is None or known.role != question.role or not is_echo(output, answer):
            return None
        words, repeated = ((message.content or "").strip() for message in (known, question))
        is_same = words == repeated or (bool(repeated) and words.startswith(repeated))
        # An answer that repeats one of its own prompt, such as an example, may be that example.
        is_repeated = any(says_the_same(output, message) for message in prompt)
        return given[0] if is_same and not is_repeated else None

    def _follow_faithful(self, entry: _Entry, position: int, messages: Sequence[ChatMessage]) -> tuple[_Entry, int]:
        """Return the last answer that continues ``entry`` at ``position`` as the messages do, and its own position."""
        # Qwen Code compresses a history from which it drops a reminder of an earlier turn. The last answer has no calls
        # to be found by, but it is the only one that follows a proven answer in these words.
        for later in range(position + 1, len(messages) - 1):
            if messages[later].role != "assistant":
                continue
            between = messages[position + 1 : later]
            found = []
            for other in self._entries:
                turn = self._lookup(other.id)
                if turn.parent != entry.id or turn.completed_order is None or turn.output is None:
                    continue
                is_edit = turn.num_kept is not None or turn.num_instructions is not None
                if is_edit or len(turn.messages) != len(between) or not says_the_same(turn.output, messages[later]):
                    continue
                if all(map(says_the_same, turn.messages, between)):
                    found.append(other)
            if len(found) != 1:
                break
            entry, position = found[0], later
        return entry, position

    def _is_ancestor(self, interaction: Interaction, entry: _Entry) -> bool:
        parent = self._lookup(entry.id).parent
        while parent is not None and parent != interaction.id:
            parent = self._lookup(parent).parent
        return parent is not None

    def _edited(self, entry: _Entry, position: int, asked: Match, *, base: tuple[Interaction, int] | None) -> Match:
        """Return the match of a request that edits the answer of ``entry``, now at ``position``, or its history."""
        parent, messages = self._lookup(entry.id), asked.messages
        stored, start = full_history(parent, self._lookup), num_leading_instructions(messages)
        # Faithful echoes at the start stay the parent's own messages; everything after them is new.
        num_shared = 0
        for left, right in zip(without_instructions(stored), messages[start:], strict=False):
            if not says_the_same(left, right):
                break
            num_shared += 1
        new, num_instructions = messages[start + num_shared :], None
        reason = _edit_or_truncation(position, entry.num_messages)
        if entry.frame.system != asked.frame.system:
            reason, num_instructions, new = ForkReason.NEW_SYSTEM_PROMPT, start, messages[:start] + new
        return evolve(
            asked,
            parent=parent,
            new_messages=new,
            fork_hint=reason,
            num_instructions=num_instructions,
            num_kept=num_leading_instructions(stored) + num_shared,
            base=None if base is None else base[0],
            num_beyond=0 if base is None else len(messages) - base[1] - 1,
        )

    def _asked_alike(self, messages: Sequence[ChatMessage]) -> Sequence[_Entry]:
        """Return the interactions whose prompts differ from ``messages`` in the model's answers at most."""
        # Indexed on demand; most sessions never need it.
        for entry in self._entries[self._num_alike :]:
            prompt = full_history(self._lookup(entry.id), self._lookup, with_answer=False)
            self._alike[_questions_digest(prompt)].append(entry)
        self._num_alike = len(self._entries)
        return self._alike.get(_questions_digest(messages), ())


def _questions_digest(messages: Sequence[ChatMessage]) -> bytes:
    """Return the digest of a history, without instructions, in which only the place of each answer counts."""
    digest = ROOT_DIGEST
    for message in without_instructions(messages):
        digest = extend_digest(digest, _ANSWER if message.role == "assistant" else message)
    return digest


_ANSWER = ChatMessage(role="assistant")


def _digest(request: CompletionRequest) -> Match:
    """Return the match of a request without a parent."""
    messages = request.messages
    frame = Frame(system_digest(messages), tools_digest(request.tools), options_digest(request.template_kwargs))
    digests, root = prefix_digests(messages), ForkReason.ROOT
    return Match(messages=messages, digests=digests, frame=frame, new_messages=messages, fork_hint=root)


def _edit_or_truncation(position: int, num_messages: int) -> ForkReason:
    """Return what the client did to the ``num_messages`` before an answer that now is at ``position``."""
    return ForkReason.HISTORY_TRUNCATED if position < num_messages else ForkReason.CLIENT_EDITED_HISTORY


def _answer_positions(messages: Sequence[ChatMessage]) -> Iterator[int]:
    return (i for i in range(len(messages) - 1, -1, -1) if messages[i].role == "assistant")


def _call_ids(messages: Sequence[ChatMessage]) -> list[str]:
    return [call.id for message in messages for call in message.tool_calls]


def _frame_reason(parent: Frame, frame: Frame) -> ForkReason | None:
    if parent.system != frame.system:
        return ForkReason.NEW_SYSTEM_PROMPT
    if parent.tools != frame.tools:
        return ForkReason.TOOLS_CHANGED
    if parent.options != frame.options:
        return ForkReason.TEMPLATE_OPTIONS_CHANGED
    return None
