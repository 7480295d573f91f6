"""What a scenario shows, read off the session's record: parents, forks, lost and cancelled interactions, errors.

The judge does not trust the links that it judges: whose turn a request continues is read off the labels in its prompt.
The requests of one label are one conversation, asked one after another, so the true parent of each is the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from attrs import frozen
from tools.clients.model import label_of

from areal_actors.domain import ForkReason, Interaction, InteractionStatus, SessionRecord

__all__ = ["ERRORS", "Links", "Miss", "Verdict", "judge", "judge_links"]

ERRORS = {"wrong_key": 401, "bad_parameter": 400, "busy": 429, "overflow": 400}
"""The scenarios that must fail, by the status that the client is answered with."""

_NAMES = {401: "Authentication", 400: "BadRequest", 429: "RateLimit"}
"""How SDKs call the exceptions of a status."""


_WORDS = {401: ("this key",), 400: ("surprise", "maximum context length"), 429: ("no room",)}
"""Of the proxy's messages."""


@frozen(kw_only=True)
class Miss:
    """A follow-up turn that was not linked to its true parent, and where it hangs instead."""

    turn: int
    reason: str


@frozen(kw_only=True)
class Links:
    """How the follow-up turns of a session were linked. A wrong link is one to a turn of another conversation."""

    follow_ups: int = 0
    linked: int = 0
    wrong: int = 0
    misses: tuple[Miss, ...] = ()
    forks: tuple[ForkReason, ...] = ()


@frozen(kw_only=True)
class Verdict:
    """What is known of one scenario of one client."""

    outcome: str
    """``works``, ``fails`` or ``not applicable``."""
    why: str | None = None
    links: Links = Links()


def judge(scenario: str, reply: Mapping[str, Any], record: SessionRecord, prompts: Mapping[str, str]) -> Verdict:
    """Weigh the client's own word and the session's record.

    Args:
        scenario: its name.
        reply: the driver's line.
        record: the session afterwards.
        prompts: the prompts that the engine was sent during the scenario, by the id of the interaction.
    """
    if reply["outcome"] == "not applicable":
        return Verdict(outcome="not applicable", why=reply["why"])
    links = judge_links(record.interactions, prompts)
    fault = _fault_of_record(scenario, record, prompts)
    if scenario in ERRORS:
        return _judge_error(ERRORS[scenario], reply, fault)
    if reply["outcome"] != "ok":
        fault = reply["why"]
    return Verdict(outcome="fails" if fault else "works", why=fault, links=links)


def _fault_of_record(scenario: str, record: SessionRecord, prompts: Mapping[str, str]) -> str | None:
    """What is wrong with the record, whatever the client says."""
    kept = {interaction.id for interaction in record.interactions}
    if lost := prompts.keys() - kept:
        return f"{len(lost)} of {len(prompts)} interactions are not in the session"
    statuses = [interaction.status for interaction in record.interactions]
    if InteractionStatus.PENDING in statuses:
        return "an interaction is still pending"
    if scenario == "cancelled" and InteractionStatus.CANCELLED not in statuses:
        return f"the proxy did not notice that the client had gone: {', '.join(statuses) or 'no request'}"
    return None


def _judge_error(status: int, reply: Mapping[str, Any], fault: str | None) -> Verdict:
    """Whether the client raised what it raises for this status; the classes are what the table shows."""
    if reply["outcome"] == "ok":
        return Verdict(outcome="fails", why="nothing was raised")
    chain: Sequence[Mapping[str, Any]] = reply["errors"]
    is_known = any(_tells(error, status) for error in chain)
    if fault or not is_known:
        return Verdict(outcome="fails", why=fault or reply["why"])
    return Verdict(outcome="works", why=chain[0]["class"])


def _tells(error: Mapping[str, Any], status: int) -> bool:
    """Whether an exception says what the proxy said: by its status, its class, or the words that it repeats."""
    is_named = _NAMES[status] in error["class"] or f"Error code: {status}" in error["message"]
    return error["status"] == status or is_named or any(word in error["message"] for word in _WORDS[status])


def judge_links(interactions: Sequence[Interaction], prompts: Mapping[str, str]) -> Links:
    """Compare the parents of the completed interactions with those that their labels tell."""
    completed = [turn for turn in interactions if turn.status is InteractionStatus.COMPLETED and turn.id in prompts]
    labels = {turn.id: label_of(prompts[turn.id]) for turn in completed}
    talks: dict[str | None, list[Interaction]] = {}
    for turn in sorted(completed, key=lambda turn: turn.order):
        talks.setdefault(labels[turn.id], []).append(turn)
    followers = [(before, turn) for talk in talks.values() for before, turn in pairwise(talk)]
    misses = [(before, turn) for before, turn in followers if turn.parent != before.id]
    return Links(
        follow_ups=len(followers),
        linked=len(followers) - len(misses),
        wrong=sum(turn.parent is not None and labels.get(turn.parent) != labels[turn.id] for turn in completed),
        misses=tuple(Miss(turn=_position(talks[labels[turn.id]], turn), reason=_reason(turn)) for _, turn in misses),
        forks=tuple(turn.fork for _, turn in followers if turn.fork is not None),
    )


def _position(talk: Sequence[Interaction], turn: Interaction) -> int:
    return 1 + [other.id for other in talk].index(turn.id)


def _reason(turn: Interaction) -> str:
    if turn.parent is not None:
        return "an earlier answer is its parent"
    return str(turn.fork or "no reason")
