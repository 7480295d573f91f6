"""Episodes over a dataset whose agent may have to start over: their turns are recorded, and answered again.

The records outlive the sessions. A session is one run of an agent; when the next run opens a session at the same place,
it is given a ``Recording`` of the turns of all runs before. The record is forgotten when the episode's rows are stored.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from hashlib import blake2b

import anyio
from attrs import define, field

from areal_actors.cache import ConversationTree, PromptPlan
from areal_actors.domain import (
    Answer,
    EpisodePlace,
    GroupId,
    JournalEvent,
    SampleKey,
    SessionForgotten,
    SessionId,
    TurnEnded,
)
from areal_actors.errors import JournalError
from areal_actors.journal import Journal, RecordedEpisode, Recording, start_episode
from areal_actors.lib.telemetry import get_logger
from areal_actors.sessions.journal import answer_of

_log = get_logger(__name__)

_WRITE_SECONDS = 10.0
"""Time limit of a write. It is shorter than that of a service, whose agents would lose more than time."""


@define(eq=False, kw_only=True)
class EpisodeRecord:
    """The turns of an episode so far; the journal of its present session.

    ``name`` is its session in the journal, whatever sessions it has. ``recording`` is what its present agent has not
    been answered yet.
    """

    place: EpisodePlace
    name: SessionId
    turns: list[TurnEnded]
    is_remade: bool = False
    recording: Recording = field(factory=lambda: Recording(()))
    _records: EpisodeRecords = field(alias="records")

    failure: None = field(default=None, init=False)
    """Episodes go on without their journal."""

    async def write(self, *events: JournalEvent) -> None:
        """Write ``events``, and record the turns among them. Never raises: the episode is then not durable."""
        await self._records.write(*events)
        self.turns += [event for event in events if isinstance(event, TurnEnded)]

    def note(self, *events: JournalEvent) -> None:
        """Write ``events`` without waiting."""
        self._records.note(*events)

    async def read(self) -> AsyncIterator[JournalEvent]:
        """Yield the turns."""
        for turn in tuple(self.turns):
            yield turn


class EpisodeRecords:
    """The records of the episodes that run, by place.

    They are written to ``journal``. If it fails, episodes are no longer durable, and the run continues. ``settings`` is
    the digest of the settings that they are sampled with, ``restored`` are those of an earlier process.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        settings: str,
        restored: Iterable[RecordedEpisode] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._journal = journal
        self._settings = settings
        self._clock = clock
        self._is_broken = False
        self._records: dict[GroupId, dict[int, EpisodeRecord]] = {}
        for episode in restored:
            self._add(
                EpisodeRecord(
                    place=episode.place,
                    name=episode.name,
                    turns=list(episode.turns),
                    is_remade=episode.is_remade,
                    records=self,
                )
            )

    def __len__(self) -> int:
        """Return the number of recorded episodes."""
        return sum(map(len, self._records.values()))

    async def open(self, place: EpisodePlace, *, key: SampleKey, name: SessionId) -> EpisodeRecord:
        """Return the record of the episode at ``place``, for an agent that begins.

        If there is none, its start is written to the journal under ``name``.
        """
        record = self._records.get(place.group, {}).get(place.member)
        if record is None:
            record = EpisodeRecord(place=place, name=name, turns=[], records=self)
            self._add(record)
            await self.write(start_episode(name, place, key=key, settings=self._settings, started_at=self._clock()))
        record.recording = Recording(record.turns)
        return record

    def forget(self, group: GroupId, member: int | None) -> None:
        """Forget a member of ``group``, or all of them: their rows are stored."""
        members = self._records.get(group, {})
        gone = [members.pop(at) for at in list(members) if member is None or at == member]
        self.note(*(SessionForgotten(session=record.name) for record in gone))
        if not members:
            self._records.pop(group, None)

    async def write(self, *events: JournalEvent) -> None:
        """Write ``events``, or log once that episodes are no longer durable."""
        if self._is_broken:
            return
        try:
            # Shielded, because the agent's answer is recorded although the agent has left.
            with anyio.fail_after(_WRITE_SECONDS, shield=True):
                await self._journal.write(*events)
        except (JournalError, TimeoutError) as error:
            self._is_broken = True
            detail = "A resumed run samples the turns of unfinished episodes again."
            _log.warning("turns_not_durable", reason=repr(error), detail=detail)

    def note(self, *events: JournalEvent) -> None:
        """Write ``events`` without waiting."""
        if events and not self._is_broken:
            self._journal.note(*events)

    def _add(self, record: EpisodeRecord) -> None:
        self._records.setdefault(record.place.group, {})[record.place.member] = record


def digest_request(plan: PromptPlan, tag: str | None) -> str:
    """Return the digest of everything that the answer of a request depends on, and of its role.

    Its messages count as the exact ids of the prompt, and by the digests of the tools and of the template's options.
    """
    request, frame = plan.request, plan.match.history.frame
    digest = blake2b(plan.token_ids.tobytes(), digest_size=16)
    for part in (frame.system, frame.tools, frame.options):
        digest.update(part)
    wanted = (request.sampling, request.tool_choice, request.parallel_tool_calls, request.response_format)
    kind = (request.num_choices, request.seed, request.store, tag, request.prompt is None, request.id_prefix)
    digest.update(repr((wanted, kind)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def answer_again(
    tree: ConversationTree, plan: PromptPlan, turns: Sequence[TurnEnded], tag: str | None
) -> tuple[Answer, ...]:
    """Add the recorded choices of a request to ``tree``, at the place that ``plan`` gives them, and return the answers.

    They keep their ids, tokens, log-probabilities and versions. Rewards are not kept: the agent sets its own.
    """
    answers: list[Answer] = []
    for turn in turns:
        recorded = turn.interaction
        tree.begin(recorded.id, plan, sampling=recorded.sampling, tag=tag)
        assert recorded.completion is not None
        assert recorded.output is not None
        tree.complete(recorded.id, recorded.completion, recorded.output)
        answers.append(answer_of(turn))
    return tuple(answers)
