"""Which answers a request may continue, by what its client means: an oracle that knows the clients' keys alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from attrs import define, field, frozen
from tools.fuzz.moves import Talk
from tools.fuzz.words import key_of

from areal_actors.domain import ForkReason, Interaction

__all__ = ["Asked", "Links"]

_EDITS = {ForkReason.CLIENT_EDITED_HISTORY, ForkReason.HISTORY_TRUNCATED, ForkReason.NEW_SYSTEM_PROMPT}


@frozen
class Asked:
    """One request: the meaning of its history up to each answer in it (the latest first), and what surrounds it.

    ``named`` is the answer that it follows by name. ``certain`` is the one that its client means and gives proof of.
    ``own`` are those that its conversation was given: one of them may be its parent although the client edited it.
    """

    prefixes: tuple[tuple[int, bool], ...]
    whole: int
    system: tuple[str, ...]
    moment: int
    named: str | None
    certain: str | None
    own: tuple[str, ...]


@frozen
class _Known:
    interaction: str
    system: tuple[str, ...]
    moment: int


@define
class Links:
    """The answers of one session by the meaning of what led to them."""

    _known: dict[int, list[_Known]] = field(factory=dict)
    _moment: int = 0

    def ask(self, talk: Talk) -> Asked:
        """Note a request."""
        digest, is_faithful, prefixes = 0, True, []
        leading = tuple(takewhile(lambda entry: entry.keys[0][0] == "system", talk.entries))
        system = (*talk.system, *(entry.keys[0][1] for entry in leading))
        for entry in talk.entries[len(leading) :]:
            is_faithful &= entry.is_faithful
            for key in entry.keys:
                digest = hash((digest, key))
            if entry.keys[-1][0] == "assistant":
                prefixes.append((digest, is_faithful))
        self._moment += 1
        last = talk.last
        is_proven = last is not None and bool(last.message.tool_calls) and _is_kept(talk, last.message.tool_calls[0].id)
        certain = last.interaction if last is not None and is_proven else None
        return Asked(tuple(reversed(prefixes)), digest, system, self._moment, talk.named, certain, talk.own)

    def answer(self, asked: Asked, interaction: str, talk: Talk) -> None:
        """Note its answer, which ends ``talk``."""
        assert talk.last is not None
        digest = hash((asked.whole, key_of(talk.last.message)))
        self._moment += 1
        self._known.setdefault(digest, []).append(_Known(interaction, asked.system, self._moment))

    def judge(self, asked: Asked, turn: Interaction) -> str | None:
        """What is wrong with the turn's parent; ``None`` if nothing is."""
        if asked.named is not None:
            return None if turn.parent == asked.named else f"{turn.id} names {asked.named}, hangs on {turn.parent}"
        allowed: list[_Known] = []
        is_required = False
        for digest, is_faithful in asked.prefixes:
            found = self._known.get(digest, [])
            same = [known for known in found if known.system == asked.system]
            allowed += same or found
            is_required = is_faithful and any(known.moment <= asked.moment for known in same)
            if is_required:
                break
        names = [known.interaction for known in allowed]
        if turn.parent is None:
            return f"{turn.id} was not linked to any of {names}" if is_required else None
        # Under other instructions, equal words prove nothing, so that an earlier answer of the conversation is as good.
        proven = [known.interaction for known in allowed if known.system == asked.system]
        if turn.fork in _EDITS and turn.parent in asked.own and _is_later(turn.parent, proven, asked.own):
            return None
        if turn.parent not in names:
            return f"{turn.id} hangs on {turn.parent}, which it does not continue; it may continue {names}"
        if asked.certain in names and turn.parent != asked.certain and asked.certain == names[0]:
            return f"{turn.id} hangs on {turn.parent}, and its calls name {asked.certain}"
        return None


def _is_later(name: str, others: Sequence[str], own: Sequence[str]) -> bool:
    """Whether an answer was given after those whose faithful echoes the history has."""
    return own.index(name) > max((own.index(other) for other in others if other in own), default=-1)


def _is_kept(talk: Talk, call_id: str) -> bool:
    """Whether the echo repeats the id of the first call of the last answer."""
    echoes: Sequence[object] = [entry.wire for entry in talk.entries if entry.keys[-1][0] == "assistant"][-1:]
    return call_id in repr(echoes)
