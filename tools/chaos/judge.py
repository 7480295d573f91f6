"""What must be true after a play: what agents were told, against the journal, the steps that were made, and the files.

A step that was made by a life whose weights are lost was not made: what counts is the lineage of the weights that there
are. Each finding is a sentence; none is good news.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from attrs import field, frozen
from tools.chaos.ledger import Line, read_ledger

from areal_actors.domain import InteractionStatus, TurnEnded
from areal_actors.journal.tables import decode_row
from areal_actors.kernel.remote.codec import Codec

__all__ = ["Evidence", "Verdict", "judge", "read_evidence", "surviving"]

Step = Mapping[str, Any]


@frozen(kw_only=True)
class Evidence:
    """Everything that was written down. ``ledgers`` are those of the agents, one after another.

    ``turns`` (answer and digest of tokens), ``rewards``, ``endings`` (is_final), ``forgotten``
    and ``waiting`` are what the journal says, by session; ``consumed`` says of groups whether they were trained.
    """

    ledgers: tuple[Line, ...]
    steps: tuple[Step, ...]
    metrics: tuple[Mapping[str, Any], ...]
    dumps: Mapping[tuple[int, int], int]
    """Rows by position and member."""
    sessions: Mapping[str, Mapping[str, Any]]
    turns: Mapping[tuple[str, str], tuple[str, str]]
    rewards: Mapping[tuple[str, str], float]
    endings: Mapping[str, bool]
    forgotten: frozenset[str]
    waiting: frozenset[str]
    consumed: Mapping[str, bool]


@frozen(kw_only=True)
class Verdict:
    """``counts`` say how much there was; ``problems`` what was wrong with it."""

    problems: tuple[str, ...]
    counts: Mapping[str, int] = field(factory=dict)


def judge(evidence: Evidence) -> Verdict:
    """Look at everything."""
    steps = surviving(evidence.steps)
    trained = _trained(steps)
    fates = Counter(_fate(session, evidence, trained) for session in _of(evidence, "final"))
    problems = [
        *_lost_turns(evidence),
        *_lost_rewards(evidence),
        *_lost_sessions(evidence, trained),
        *_wrongly_gone(evidence),
        *_trained_twice(steps),
        *_wrongly_trained(evidence, trained),
        *_wrong_files(evidence, steps, trained),
    ]
    counts = {
        "sessions opened": len(_of(evidence, "session")),
        "turns acknowledged": sum(line["kind"] == "turn" for line in evidence.ledgers),
        "rewards acknowledged": sum(line["kind"] == "rewarded" for line in evidence.ledgers),
        "sessions finalized": len(_of(evidence, "final")),
        "sessions left alone": len(_of(evidence, "left")),
        "sessions gone": len(_of(evidence, "gone")),
        "steps made": sum(step["event"] == "trained" for step in evidence.steps),
        "steps that count": len(steps),
        "sessions trained": len(trained),
        **{f"finalized and {fate}": number for fate, number in sorted(fates.items())},
    }
    return Verdict(problems=tuple(problems), counts=counts)


def surviving(events: Iterable[Step]) -> list[Step]:
    """The steps that the last weights are made of."""
    steps: list[Step] = []
    life = 0
    for event in events:
        if event["life"] != life:  # weights that were not restored are those of the beginning
            life = event["life"]
            if event["event"] != "restored":
                steps.clear()
        if event["event"] == "restored":
            steps = [step for step in steps if step["version"] <= event["version"]]
        else:
            # A process may also begin anew without a checkpoint, when an attempt ends that it was part of.
            steps = [*(step for step in steps if step["version"] < event["version"]), event]
    return steps


def _trained(steps: Sequence[Step]) -> dict[str, Mapping[str, Any]]:
    """The episodes that were trained, by session, with their group's position."""
    return {
        episode["session"]: {**episode, "group": group["group"], "position": group["position"]}
        for step in steps
        for group in step["groups"]
        for episode in group["episodes"]
    }


def _of(evidence: Evidence, kind: str) -> list[str]:
    return [line["session"] for line in evidence.ledgers if line["kind"] == kind]


# ------------------------------------------------------------------------------------------------- what was lost


def _lost_turns(evidence: Evidence) -> Iterator[str]:
    for line in evidence.ledgers:
        if line["kind"] == "turn":
            found = evidence.turns.get((line["session"], line["interaction"]))
            if found is None:
                yield f"turn lost: {line['interaction']} of {line['session']}"
            elif found[0] != line["answer"]:
                yield f"turn changed: {line['interaction']} said {line['answer']!r}, the journal {found[0]!r}"


def _lost_rewards(evidence: Evidence) -> Iterator[str]:
    """The reward that was acknowledged last must be there, or one that was sent after it."""
    allowed: dict[tuple[str, str], list[float]] = {}
    finals: dict[str, float] = {}
    for line in evidence.ledgers:
        if line["kind"] in ("wanted", "rewarded") and line["interaction"] is None:
            finals[line["session"]] = line["reward"]
        elif line["kind"] == "wanted":
            allowed.setdefault((line["session"], line["interaction"]), []).append(line["reward"])
        elif line["kind"] == "rewarded":
            allowed[line["session"], line["interaction"]] = [line["reward"]]
    acknowledged = {(line["session"], line["interaction"]) for line in evidence.ledgers if line["kind"] == "rewarded"}
    of_session: dict[str, set[float]] = defaultdict(set)
    for (session, _), reward in evidence.rewards.items():
        of_session[session].add(reward)
    for session, interaction in acknowledged:
        if interaction is None:
            if finals[session] not in of_session[session]:
                yield f"reward lost: the last one of {session}, {finals[session]}"
            continue
        found = evidence.rewards.get((session, interaction))
        if found not in (*allowed[session, interaction], finals.get(session)):
            yield f"reward lost: of {interaction} of {session}; there is {found}"


def _lost_sessions(evidence: Evidence, trained: Mapping[str, Any]) -> Iterator[str]:
    for line in evidence.ledgers:
        if line["kind"] == "session" and line["session"] not in evidence.sessions:
            yield f"session lost: {line['session']}"
        if line["kind"] == "final":
            if not evidence.endings.get(line["session"]):
                yield f"end lost: {line['session']} was finalized"
            if _fate(line["session"], evidence, trained) == "lost":
                yield f"trajectory lost: {line['session']} was finalized, and is neither trained nor waits"


def _fate(session: str, evidence: Evidence, trained: Mapping[str, Any]) -> str:
    """What became of a session that was finalized."""
    if session in trained:
        return "trained"
    if session in evidence.waiting:
        return "waits"
    group = evidence.sessions.get(session, {}).get("group_id")
    if group is not None and evidence.consumed.get(group) is False:
        return "dropped as stale"
    return "lost"


def _wrongly_gone(evidence: Evidence) -> Iterator[str]:
    """Only a session that has ended is refused."""
    for line in evidence.ledgers:
        if line["kind"] == "gone" and line["session"] not in evidence.endings.keys() | evidence.forgotten:
            yield f"session refused: {line['session']} is live, and {line['doing']} got {line['status']}"


# ---------------------------------------------------------------------------------------------- what was trained


def _trained_twice(steps: Sequence[Step]) -> Iterator[str]:
    sessions = Counter(
        episode["session"] for step in steps for group in step["groups"] for episode in group["episodes"]
    )
    for session, number in sessions.items():
        if number > 1:
            yield f"trained {number} times: {session}"
    versions = [step["version"] for step in steps]
    if versions != list(range(1, len(versions) + 1)):
        yield f"steps are missing or made twice: {versions}"


def _wrongly_trained(evidence: Evidence, trained: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A trained session has all turns that were acknowledged, with their tokens, and all rewards."""
    for line in evidence.ledgers:
        episode = trained.get(line["session"])
        if line["kind"] == "turn" and episode is not None:
            name = line["interaction"]
            if name not in episode["sampled"] and name not in episode["untrained"]:
                yield f"turn not trained: {name} of {line['session']}"
    rewards: dict[str, float] = defaultdict(float)
    for (session, _), reward in evidence.rewards.items():
        rewards[session] += reward
    for session, episode in trained.items():
        if abs(rewards[session] - episode["reward"]) > 1e-6:
            yield f"trained with reward {episode['reward']}, not {rewards[session]}: {session}"
        for name, digest in episode["sampled"].items():
            if evidence.turns.get((session, name), ("", ""))[1] != digest:
                yield f"trained with other tokens than were answered: {name} of {session}"


def _wrong_files(evidence: Evidence, steps: Sequence[Step], trained: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    told = [record["step"] for record in evidence.metrics if record["step"]]
    if told != [step["version"] for step in steps]:
        yield f"metrics.jsonl has steps {told}, and {len(steps)} were made"
    for session, episode in trained.items():
        number = evidence.dumps.get((episode["position"], episode["member"]), 0)
        if number != episode["num_rows"]:
            yield f"{number} rows of {session} were dumped, {episode['num_rows']} were trained"


# ---------------------------------------------------------------------------------------------------- reading


def read_evidence(directory: Path) -> Evidence:
    """What a play has left in its directory."""
    run = directory / "run"
    codec = Codec()
    ledgers = [line for path in sorted(directory.glob("*.ledger")) for line in read_ledger(path)]
    connection = sqlite3.connect(f"file:{run / 'journal.sqlite'}?mode=ro", uri=True)
    connection.row_factory = sqlite3.Row
    try:
        ask = connection.execute
        return Evidence(
            ledgers=tuple(ledgers),
            steps=tuple(_records(directory / "steps.jsonl")),
            metrics=tuple(_records(run / "metrics.jsonl")),
            dumps=_dumps(run / "rollout"),
            sessions={row["session"]: dict(row) for row in ask("SELECT session, group_id FROM sessions")},
            turns={
                (row["session"], row["interaction"]): _turn(
                    decode_row(codec, "turns", row["messages"], row["output"], row["record"])
                )
                for row in ask("SELECT * FROM turns")
            },
            rewards=_rewards(connection),
            endings={row["session"]: bool(row["is_final"]) for row in ask("SELECT * FROM endings")},
            forgotten=frozenset(row["session"] for row in ask("SELECT session FROM forgotten")),
            waiting=_waiting(connection),
            consumed={row["group_id"]: bool(row["is_trained"]) for row in ask("SELECT * FROM consumed")},
        )
    finally:
        connection.close()


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Lines end with a line feed; other characters that break lines stand in them."""
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
        if line:
            yield json.loads(line)


def _dumps(root: Path) -> Mapping[tuple[int, int], int]:
    rows = (row for path in root.rglob("*.jsonl") for row in _records(path))
    return Counter((int(row["task_id"]), int(row["sample_idx"])) for row in rows)


def _turn(event: Any) -> tuple[str, str]:
    assert isinstance(event, TurnEnded)
    turn = event.interaction
    is_completed = turn.status is InteractionStatus.COMPLETED and turn.output is not None
    text = (turn.output.content or "") if is_completed else "(not completed)"
    tokens = b"" if turn.completion is None else turn.completion.token_ids.astype("<i4").tobytes()
    return text, blake2b(tokens, digest_size=8).hexdigest()


def _rewards(connection: sqlite3.Connection) -> dict[tuple[str, str], float]:
    """The last word on each: what a turn had when it ended, and what was said of it."""
    rewards = {
        (row["session"], row["interaction"]): float(row["reward"])
        for row in connection.execute("SELECT session, interaction, reward FROM turns WHERE reward IS NOT NULL")
    }
    for row in connection.execute("SELECT session, interaction, reward FROM rewards"):
        rewards[row["session"], row["interaction"]] = float(row["reward"])
    return rewards


def _waiting(connection: sqlite3.Connection) -> frozenset[str]:
    """Sessions of queued groups that were not consumed, and those that have ended and are in no group yet."""
    queued = connection.execute(
        "SELECT s.session FROM group_sessions s WHERE s.group_id NOT IN (SELECT group_id FROM consumed)"
    )
    loose = connection.execute(
        "SELECT session FROM endings WHERE session NOT IN (SELECT session FROM group_sessions)"
        " AND session NOT IN (SELECT session FROM forgotten)"
    )
    return frozenset(row["session"] for rows in (queued, loose) for row in rows)
