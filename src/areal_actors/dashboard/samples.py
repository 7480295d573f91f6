"""A sample of conversations, spread over the whole run and small enough to read, for the report.

``describe_session`` converts a session and its episode to plain data: each turn with its new messages, the text of each
sampled token with its log-probability, which of them were trained, under which versions, and why others were not.
``SessionSampler`` keeps a bounded number of such records in ``sessions.jsonl``: the whole group of the first problem of
every version and a few other episodes, and when there are too many, those of every second version, every fourth, and so
on. ``advantages.jsonl`` has the advantages with which their turns were trained, which are known only later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from attrs import asdict

from areal_actors.dashboard.dumps import Decode
from areal_actors.dashboard.records import RecordFile, rewrite_records
from areal_actors.dashboard.reporter import Listener
from areal_actors.domain import (
    ChatMessage,
    Interaction,
    InteractionId,
    Trajectory,
    as_ints,
    withhold_truncated,
)
from areal_actors.kernel import Message
from areal_actors.lib.telemetry import redact
from areal_actors.messages import GroupsTrained, Progress, SessionArchived

_NUM_MEMBERS = 8
"""Episodes of the problem of each version whose group is kept, so that its answers can be compared."""
_NUM_OTHERS = 2
"""Episodes of other problems, of each version, purpose and outcome."""
_MAX_TURNS = 64
_MAX_TOKENS = 2048
_MAX_TEXT = 8_000
"""Bounds on one record: characters of a message, sampled tokens of a session, turns. Omitted content is counted."""


class SessionSampler(Listener):
    """Writes ``sessions.jsonl`` with at most ``max_sessions`` records, and ``advantages.jsonl`` of trained ones.

    ``num_per_version`` limits the records of each version, purpose and outcome; by default there are a few.
    """

    name = "sessions.jsonl"

    def __init__(
        self,
        path: Path,
        *,
        decode: Decode,
        max_sessions: int = 120,
        num_per_version: int | None = None,
        resumed_step: int | None = None,
        masks_truncated: bool = False,
    ) -> None:
        self._path = path
        self._masks_truncated = masks_truncated
        self._decode = decode
        self._max = max_sessions
        self._num_per_version = num_per_version
        self._resumed_step = resumed_step
        self._file = RecordFile(path, is_private=True)
        self._advantages = RecordFile(path.with_name("advantages.jsonl"))
        self._stride = 1
        self._versions: list[int] = []
        self._turns: set[str] = set()
        """The ids of the turns in the file."""
        self._leads: dict[tuple[int, bool], str] = {}
        """The problem of each version and purpose whose group is kept."""
        self._seen: Counter[tuple[int, bool, bool, bool]] = Counter()

    def open(self) -> None:
        """Remove the sessions of episodes that may be repeated, and the advantages of steps that will be."""
        limit = self._resumed_step or 0
        self._keep(lambda record: int(record["version"]) < limit)
        rewrite_records(self._advantages.path, lambda record: record["step"] <= limit)

    def on_event(self, news: Message[Progress, None]) -> None:
        """Keep the session if it is among the first of its version and kind, or its advantages. Raises ``OSError``."""
        if isinstance(news, GroupsTrained):
            found = {turn: runs for turn, runs in news.advantages.items() if turn in self._turns}
            if found:
                self._advantages.append({"step": news.step, "turns": found})
        elif isinstance(news, SessionArchived):
            version = sampled_version(news.record.interactions)
            if self._is_wanted(news, version):
                self._add(news, version)

    def _is_wanted(self, news: SessionArchived, version: int) -> bool:
        task = news.problem.task
        # The next version may have sampled the last members of a group.
        before = self._leads.get((version - 1, news.is_eval))
        is_member = task == before or task == self._leads.setdefault((version, news.is_eval), task)
        kind = (version, news.is_eval, news.episode.failure is not None, is_member)
        self._seen[kind] += 1
        most = min(self._num_per_version or (_NUM_MEMBERS if is_member else _NUM_OTHERS), self._max)
        return version % self._stride == 0 and self._seen[kind] <= most

    def _add(self, news: SessionArchived, version: int) -> None:
        """Append the session, and remove others if there are too many."""
        described = describe_session(news, version=version, decode=self._decode, masks_truncated=self._masks_truncated)
        self._file.append(described)
        self._versions.append(version)
        self._turns.update(turn["id"] for turn in described["turns"])
        if len(self._versions) <= self._max:
            return
        # Keep every second version, every fourth, … until at least half of the records are free. The stride is doubled,
        # so that the versions to keep are among those that were kept so far.
        while sum(v % self._stride == 0 for v in self._versions) > self._max // 2 and self._stride <= max(
            self._versions
        ):
            self._stride *= 2
        # One version alone may have more records than there is room for.
        room = iter(range(self._max))
        self._keep(lambda record: record["version"] % self._stride == 0 and next(room, None) is not None)

    def _keep(self, is_kept: Callable[[dict[str, Any]], bool]) -> None:
        """Remove the other sessions from the file, and their advantages."""
        self.close()
        kept = rewrite_records(self._path, is_kept)
        self._versions = [record["version"] for record in kept]
        self._turns = {turn["id"] for record in kept for turn in record["turns"]}
        rewrite_records(self._advantages.path, lambda record: not self._turns.isdisjoint(record["turns"]))

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._advantages.close()


def sampled_version(interactions: Iterable[Interaction]) -> int:
    """Return the oldest version that sampled a token of the session; 0 if there is none."""
    completions = [turn.completion for turn in interactions if turn.completion is not None]
    return min((int(version) for completion in completions for version in completion.versions), default=0)


def describe_session(
    news: SessionArchived, *, version: int, decode: Decode, masks_truncated: bool = False
) -> dict[str, Any]:
    """Return a session as plain data, bounded in size. With ``masks_truncated``, truncated answers are not trained."""
    record = news.record
    episode = withhold_truncated(news.episode) if masks_truncated else news.episode
    returns, masks = _trained(episode.trajectories)
    credit_of = {
        name: info.credit
        for row in episode.trajectories
        for name, info in zip(row.interactions, row.turn_infos, strict=False)  # rows of workflows have no turn infos
    }
    budget = _MAX_TOKENS
    turns = []
    for turn in record.interactions[:_MAX_TURNS]:
        described = _describe_turn(turn, decode, budget)
        # Rows of evaluations are not trained.
        mask = () if news.is_eval else masks.get(turn.id, ())
        described |= {"return": returns.get(turn.id), "credit": credit_of.get(turn.id), "mask": _runs(mask)}
        budget -= len(described["tokens"])
        turns.append(described)
    return {
        # Without what may be a secret.
        "session": redact(f"session {record.id}").removeprefix("session "),
        "version": version,
        "is_eval": news.is_eval,
        "task_id": news.problem.task,
        "sample_idx": episode.member,
        "reward": episode.reward,
        "logged": dict(episode.logged),
        "seconds": round(episode.seconds, 3),
        "failure": None if episode.failure is None else _cut(episode.failure),
        "limit": episode.limit,
        "untrained": [asdict(entry) for entry in episode.untrained],
        "turns": turns,
        "num_turns": len(record.interactions),
    }


def _describe_turn(turn: Interaction, decode: Decode, budget: int) -> dict[str, Any]:
    completion = turn.completion
    ids = () if completion is None else completion.token_ids[: max(budget, 0)]
    logprobs = () if completion is None else completion.logprobs.tolist()
    return {
        "id": turn.id,
        "parent": turn.parent,
        "token_parent": turn.token_parent,
        "fork": turn.fork,
        "status": turn.status,
        "tag": turn.tag,
        "reward": turn.reward,
        "is_stored": turn.is_stored,
        "failure": None if turn.failure is None else _cut(turn.failure),
        "messages": [_describe_message(message) for message in turn.messages],
        "answer": None if turn.output is None else _describe_message(turn.output),
        "num_prompt_tokens": turn.num_prompt_tokens,
        "num_tokens": 0 if completion is None else len(completion.token_ids),
        "finish": None if completion is None else completion.finish,
        "tokens": [
            [decode(as_ints([token])), round(logprob, 3)] for token, logprob in zip(ids, logprobs, strict=False)
        ],
        "versions": [] if completion is None else _runs(completion.versions.tolist()),
    }


def _describe_message(message: ChatMessage) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": _cut(call.arguments)} for call in message.tool_calls]
    texts = {"content": message.content, "reasoning": message.reasoning}
    described = {key: _cut(text) for key, text in texts.items() if text}
    return {"role": message.role, **described, **({"tool_calls": calls} if calls else {})}


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text) - _MAX_TEXT} more characters)"


def _trained(rows: Sequence[Trajectory]) -> tuple[dict[InteractionId, float], dict[InteractionId, list[int]]]:
    """Return the return of each turn, and a mask of its tokens that says whether any row trains them."""
    returns: dict[InteractionId, float] = {}
    masks: dict[InteractionId, list[int]] = {}
    for row in rows:
        for index, interaction in enumerate(row.interactions):
            places = row.turns == index
            mask = row.loss_mask[places].tolist()
            if any(mask):
                returns[interaction] = float(row.returns[places][0])
            before = masks.setdefault(interaction, [0] * len(mask))
            masks[interaction] = [max(pair) for pair in zip(before, mask, strict=False)]
    return returns, masks


def _runs(values: Iterable[int]) -> list[list[int]]:
    """Return ``[value, count]`` for each run of equal values."""
    return [[value, len(list(run))] for value, run in groupby(values)]
