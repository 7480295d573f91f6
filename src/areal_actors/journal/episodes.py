"""The recorded turns of episodes over a dataset: what an agent that starts over is answered again.

An episode that was not over when its process ended is run again from its beginning. Its turns are in the journal, as
those of a durable session. As long as the agent asks for the same again, it is given the same answers::

    first run    ask 1 ── ask 2 ── ask 3 ── killed
    second run   ask 1 ── ask 2 ── ask 3 ── ask 4 ...         the same three answers, and new ones from there on
    another      ask 1 ── ask 2'── ask 3'...                  the first answer; turns 2 and 3 are dropped

A recorded turn is answered at most once, equal ones in the order in which they were asked. Turns that are not asked for
again are not trained, because the second run has not seen them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from attrs import evolve, field, frozen

from areal_actors.domain import (
    EpisodePlace,
    GroupId,
    InteractionId,
    InteractionStatus,
    JournalEvent,
    SampleKey,
    SessionForgotten,
    SessionId,
    SessionStarted,
    TurnEnded,
)

_PROBLEM, _MEMBER, _SETTINGS = "areal.problem", "areal.member", "areal.settings"


class Recording:
    """The requests in ``turns`` that were answered in full, for one run of the agent."""

    def __init__(self, turns: Iterable[TurnEnded]) -> None:
        completed = {
            turn.interaction.id: turn for turn in turns if turn.interaction.status is InteractionStatus.COMPLETED
        }
        self._left: dict[str, deque[tuple[TurnEnded, ...]]] = {}
        self.num_left = self.num_replayed = 0
        """Numbers of interactions."""
        for turn in sorted(completed.values(), key=lambda turn: turn.interaction.order):
            # Of several choices, the first stands for the request.
            siblings = turn.siblings or (turn.interaction.id,)
            if turn.request is None or siblings[0] != turn.interaction.id or not completed.keys() >= set(siblings):
                continue
            choices = tuple(completed[name] for name in siblings)
            self._left.setdefault(turn.request, deque()).append(choices)
            self.num_left += len(choices)

    def take(self, request: str) -> tuple[TurnEnded, ...]:
        """Return the choices of the first turn with this digest that was not taken yet; empty if there is none."""
        waiting = self._left.get(request)
        if not waiting:
            return ()
        choices = waiting.popleft()
        self.num_left -= len(choices)
        self.num_replayed += len(choices)
        return choices


@frozen(kw_only=True)
class RecordedEpisode:
    """An episode that was not over. ``name`` is its session in the journal, ``key`` keyed its samples.

    With ``is_remade``, it has tokens of weights that are not on disk. The same steps make those again, but not bit by
    bit on every device.
    """

    place: EpisodePlace
    name: SessionId
    key: SampleKey
    turns: tuple[TurnEnded, ...] = field(repr=False)
    is_remade: bool = False

    @property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest version that sampled a token; ``None`` if there is none."""
        found = [turn.interaction.completion for turn in self.turns]
        sampled = [each.versions for each in found if each is not None and len(each.versions)]
        return (min(int(v.min()) for v in sampled), max(int(v.max()) for v in sampled)) if sampled else None


def start_episode(
    name: SessionId, place: EpisodePlace, *, key: SampleKey, settings: str, started_at: float
) -> SessionStarted:
    """Return the event of the start of an episode. ``settings`` is the digest of those that it is sampled with."""
    return SessionStarted(
        session=name,
        key_digest=b"",
        sample_key=key,
        started_at=started_at,
        group=place.group,
        metadata={_PROBLEM: place.problem, _MEMBER: place.member, _SETTINGS: settings},
    )


@frozen(kw_only=True)
class RestoredEpisodes:
    """The episodes that an earlier process left. ``void`` are events that forget the others.

    ``num_too_old`` are left out because of the staleness of their tokens.
    """

    episodes: tuple[RecordedEpisode, ...] = ()
    void: tuple[JournalEvent, ...] = ()
    num_too_old: int = 0

    @property
    def heads(self) -> Mapping[tuple[str, int], int]:
        """By source and position, the oldest version that sampled a token of one of its episodes."""
        found = [(each.place.problem, each.versions[0]) for each in self.episodes if each.versions is not None]
        return {at: min(head for _, head in same) for at, same in groupby(sorted(found), key=lambda pair: pair[0])}


def restore_episodes(
    events: Iterable[JournalEvent],
    *,
    settings: str,
    version: int,
    last_version: int,
    max_staleness: int | None,
    is_over: Callable[[EpisodePlace], bool],
) -> RestoredEpisodes:
    """Return the episodes in ``events``, in order, that a process can go on with.

    It resumes from the checkpoint of ``version``, and trains its first new batch at ``last_version``. Left out are
    episodes that are over or that were sampled with other settings, those with tokens of versions after
    ``last_version``, which will be other weights, and those whose oldest token would be more than ``max_staleness``
    versions old in any step.
    """
    started: dict[SessionId, SessionStarted] = {}
    turns: dict[SessionId, dict[InteractionId, TurnEnded]] = {}
    for event in events:
        match event:
            case SessionStarted(session=name, metadata=metadata) if _PROBLEM in metadata:
                started[name] = event
            case TurnEnded(session=name, interaction=interaction):
                turns.setdefault(name, {})[interaction.id] = event
            case SessionForgotten(session=name):
                started.pop(name, None)
            case _:
                pass
    kept: dict[EpisodePlace, RecordedEpisode] = {}
    num_too_old = 0
    for name, event in started.items():
        episode = _recorded(event, tuple(turns.get(name, {}).values()), version=version)
        head, tail = episode.versions or (last_version, last_version)
        is_too_old = max_staleness is not None and last_version - head > max_staleness
        if event.metadata[_SETTINGS] != settings or is_over(episode.place) or tail > last_version:
            continue
        num_too_old += is_too_old
        if not is_too_old:
            kept[episode.place] = episode
    names = {episode.name for episode in kept.values()}
    void = tuple(SessionForgotten(session=name) for name in started if name not in names)
    return RestoredEpisodes(episodes=tuple(kept.values()), void=void, num_too_old=num_too_old)


def _recorded(event: SessionStarted, turns: Sequence[TurnEnded], *, version: int) -> RecordedEpisode:
    metadata: Mapping[str, Any] = event.metadata
    source, position = metadata[_PROBLEM]
    place = EpisodePlace(
        group=event.group or GroupId(""), problem=(str(source), int(position)), member=int(metadata[_MEMBER])
    )
    episode = RecordedEpisode(place=place, name=event.session, key=event.sample_key, turns=tuple(turns))
    return evolve(episode, is_remade=episode.versions is not None and episode.versions[1] > version)
