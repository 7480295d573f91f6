"""Encoding of events as table rows, and decoding.

A turn is a row of plain columns for values to query, blobs for arrays, and JSON for messages.

Every row has a number (``seq``) in the order in which events were handed over. A repeated event replaces the earlier
one: a session's start and a turn keep their number, so that rows that depend on them still follow, and everything else
moves to the end.
"""
# ruff: noqa: S608 - all names are those of ``TABLES``

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import orjson
from attrs import asdict, frozen

from areal_actors.domain import (
    Attempt,
    ChatMessage,
    Completion,
    Experts,
    FinishReason,
    Floats,
    ForkReason,
    GroupConsumed,
    GroupQueued,
    Interaction,
    InteractionStatus,
    Ints,
    JournalEvent,
    RewardScope,
    RewardSet,
    SampleKey,
    SamplingDistribution,
    SessionEnded,
    SessionForgotten,
    SessionStarted,
    StepLeased,
    ToolCall,
    TopLogprob,
    TurnEnded,
    VersionSaved,
    as_floats,
    as_ints,
)
from areal_actors.errors import JournalError

__all__ = [
    "TABLES",
    "TURN_COLUMNS",
    "Sql",
    "Statement",
    "Table",
    "dump_json",
    "dump_messages",
    "encode",
    "load_json",
    "load_messages",
    "pack_alternatives",
    "pack_bytes",
    "pack_experts",
    "pack_floats",
    "pack_ints",
    "real",
    "text",
    "to_text",
    "to_turn",
    "turn_values",
    "unpack_alternatives",
    "unpack_bytes",
    "unpack_experts",
    "unpack_floats",
    "unpack_ints",
]


Sql = str | bytes | int | float | None
"""A value of a row."""
_MIN_INTEGER, _MAX_INTEGER = -(1 << 63), (1 << 63) - 1
"""Bounds of SQL's integers."""

_INT, _FLOAT, _DOUBLE = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<f8")

# -------------------------------------------------------------------------------------------------------- text


def text(value: str | None) -> Sql:
    """Return a text as an SQL value."""
    if value is None or value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")
    return value


def to_text(value: Any) -> Any:
    """Return the text, or ``None``, that was given to ``text``."""
    return value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value


def real(value: float | None) -> Sql:
    """Return a number as an SQL value. SQL has no NaN, which becomes a text that ``float`` reads."""
    return "nan" if value is not None and value != value else value  # noqa: PLR0124 - only NaN differs from itself


# -------------------------------------------------------------------------------------------------------- JSON


def _plain_mapping(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r:.80} of type {type(value).__name__} is not JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain_mapping)


def dump_json(value: Any) -> Sql:
    """Return any JSON value as SQL, including integers of any size, NaN and the infinities. Tuples become lists.

    Raises:
        TypeError: for a value that is not JSON, or a key that is not a text.
        ValueError: for a value that contains itself, or an integer of thousands of digits.
        RecursionError: for a value that is nested too deep.
    """
    _check_keys(value)
    return text(_ENCODER.encode(value))


def _check_keys(value: Any) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r:.80} is not text")
            _check_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_keys(inner)


def load_json(value: Any) -> Any:
    """Return the value that was given to ``dump_json``."""
    return json.loads(to_text(value))


def dump_messages(messages: Iterable[ChatMessage]) -> Sql:
    """Return messages as a JSON array of objects with the fields that are set."""
    # The plain data is built here, so that its keys need no check.
    plain: list[dict[str, Any]] = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            fields["tool_calls"] = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in message.tool_calls]
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            fields["name"] = message.name
        if message.reasoning is not None:
            fields["reasoning"] = message.reasoning
        plain.append(fields)
    return _dump_plain(plain)


def _dump_plain(value: Any) -> Sql:
    """Return plain data without floats, whose keys are texts, as ``dump_json`` does, in a fifth of the time."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        # orjson refuses lone surrogates, and integers of more than 64 bits.
        return dump_json(value)


_sampling_texts: dict[int, tuple[SamplingDistribution, Sql]] = {}
"""By the identity of a distribution, which most turns of a process share. Equal ones may differ: 1 and 1.0."""
_MAX_TEXTS = 1024


def _dump_sampling(sampling: SamplingDistribution) -> Sql:
    known = _sampling_texts.get(id(sampling))
    if known is None:
        if len(_sampling_texts) >= _MAX_TEXTS:
            _sampling_texts.clear()
        # The entry keeps the distribution alive, so that no other one gets its identity.
        known = _sampling_texts[id(sampling)] = sampling, dump_json(asdict(sampling))
    return known[1]


def load_messages(value: Any) -> tuple[ChatMessage, ...]:
    """Return the messages that were given to ``dump_messages``."""
    messages: list[dict[str, Any]] = orjson.loads(value) if isinstance(value, str) else load_json(value)
    calls = (tuple(ToolCall(**call) for call in plain.pop("tool_calls", ())) for plain in messages)
    return tuple(ChatMessage(tool_calls=found, **plain) for found, plain in zip(calls, messages, strict=True))


# ------------------------------------------------------------------------------------------------------ arrays


def pack_ints(values: Ints) -> bytes:
    """Return int32 [n] as bytes."""
    return values.tobytes() if values.dtype is _INT else values.astype(_INT).tobytes()


def unpack_ints(blob: bytes) -> Ints:
    """Return the array that was given to ``pack_ints``, read-only. Raises ``ValueError`` for a truncated blob."""
    return as_ints(np.frombuffer(blob, _INT))


def pack_floats(values: Floats) -> bytes:
    """Return float32 [n] as bytes."""
    return values.tobytes() if values.dtype is _FLOAT else values.astype(_FLOAT).tobytes()


def unpack_floats(blob: bytes) -> Floats:
    """Return the array that was given to ``pack_floats``, read-only. Raises ``ValueError`` for a truncated blob."""
    return as_floats(np.frombuffer(blob, _FLOAT))


def pack_alternatives(alternatives: Sequence[Sequence[TopLogprob]]) -> bytes | None:
    """Return the alternatives per token: their counts, then all ids, then all log-probabilities (float64)."""
    if not alternatives:
        return None
    flat = list(chain.from_iterable(alternatives))
    counts = [len(alternatives), *map(len, alternatives)]
    ids = np.array([each.token_id for each in flat], _INT)
    return np.array(counts, _INT).tobytes() + ids.tobytes() + np.array([a.logprob for a in flat], _DOUBLE).tobytes()


def unpack_alternatives(blob: bytes | None) -> tuple[tuple[TopLogprob, ...], ...]:
    """Return the alternatives that were given to ``pack_alternatives``."""
    if blob is None:
        return ()
    (size,) = struct.unpack_from("<i", blob)
    counts = np.frombuffer(blob, _INT, size, 4).tolist()
    start, total = 4 + 4 * size, sum(counts)
    ids = np.frombuffer(blob, _INT, total, start).tolist()
    logprobs = np.frombuffer(blob, _DOUBLE, total, start + 4 * total).tolist()
    flat = (TopLogprob(token_id=i, logprob=logprob) for i, logprob in zip(ids, logprobs, strict=True))
    return tuple(tuple(next(flat) for _ in range(count)) for count in counts)


def pack_experts(experts: Experts | None) -> bytes | None:
    """Return [n, layers, k] as bytes: the size of an item, layers and k, then the items."""
    if experts is None:
        return None
    items = experts.astype(experts.dtype.newbyteorder("<"), copy=False)
    return struct.pack("<3H", experts.dtype.itemsize, *experts.shape[1:]) + items.tobytes()


def unpack_experts(blob: bytes | None) -> Experts | None:
    """Return the array that was given to ``pack_experts``."""
    if blob is None:
        return None
    size, num_layers, num_chosen = struct.unpack_from("<3H", blob)
    return np.frombuffer(blob, f"<u{size}", offset=6).reshape(-1, num_layers, num_chosen)


def pack_bytes(parts: Sequence[bytes] | None) -> bytes | None:
    """Return several digests as one blob: their number, their lengths, then the digests."""
    if parts is None:
        return None
    return struct.pack(f"<{len(parts) + 1}I", len(parts), *map(len, parts)) + b"".join(parts)


# Most turns have the frame of the turn before.
_pack_frame = lru_cache(maxsize=1024)(pack_bytes)


def unpack_bytes(blob: bytes | None) -> tuple[bytes, ...] | None:
    """Return the digests that were given to ``pack_bytes``."""
    if blob is None:
        return None
    (size,) = struct.unpack_from("<I", blob)
    position, parts = 4 + 4 * size, []
    for length in struct.unpack_from(f"<{size}I", blob, 4):
        parts.append(blob[position : position + length])
        position += length
    return tuple(parts)


_COMPLETION_COLUMNS = (
    *("finish", "num_output_tokens", "head_version", "tail_version"),
    *("token_ids", "logprobs", "raw_logprobs", "versions", "top_logprobs", "routed_experts"),
)
TURN_COLUMNS = (
    *("session", "interaction", "request_order", "completed_order", "parent", "token_parent", "fork", "status"),
    *("ended_at", "tag", "reward", "stop_sequence", "failure", "num_prompt_tokens", "num_cached_tokens", "is_stored"),
    *("has_instructions", "num_instructions", "messages", "output", "attempt", "siblings", "frame", "prompt_suffix"),
    *("prompt_digest", "asked", "sampling", "reward_scope", "num_kept", "digest", "request"),
    *_COMPLETION_COLUMNS,
)
"""All columns except the row's number."""


def turn_values(event: TurnEnded) -> tuple[Sql, ...]:
    """Return the values of ``TURN_COLUMNS``, in their order.

    This is most of what a journal adds to a turn, and written for speed: in the order of the columns, and with plain
    texts and integers, since sqlite3 looks for an adapter of every other type. ``value`` of an enum is a function of
    Python, ``_value_`` is not.
    """
    turn, attempt = event.interaction, event.attempt
    return (
        text(event.session),
        text(turn.id),
        turn.order,
        turn.completed_order,
        None if turn.parent is None else text(turn.parent),
        None if turn.token_parent is None else text(turn.token_parent),
        None if turn.fork is None else turn.fork._value_,
        turn.status._value_,
        real(event.ended_at),
        text(turn.tag),
        None if turn.reward is None else real(turn.reward),
        None if event.stop_sequence is None else text(event.stop_sequence),
        None if turn.failure is None else text(turn.failure),
        turn.num_prompt_tokens,
        event.num_cached_tokens,
        int(turn.is_stored),
        int(turn.has_instructions),
        turn.num_instructions,
        dump_messages(turn.messages),
        None if turn.output is None else dump_messages((turn.output,)),
        None
        if attempt is None
        else _dump_plain(
            {
                "fingerprint": attempt.fingerprint,
                "number": attempt.number,
                "idempotency_key": attempt.idempotency_key,
            }
        ),
        _dump_plain(event.siblings) if event.siblings else None,
        _pack_frame(event.frame),
        pack_ints(turn.prompt_suffix),
        event.prompt_digest,
        None if event.asked is None else _dump_plain(event.asked),
        None if turn.sampling is None else _dump_sampling(turn.sampling),
        turn.reward_scope._value_,
        turn.num_kept,
        turn.digest,
        event.request,
        *(_NO_COMPLETION if turn.completion is None else _completion_values(turn.completion)),
    )


_NO_COMPLETION: tuple[Sql, ...] = (None,) * len(_COMPLETION_COLUMNS)


def _completion_values(completion: Completion) -> tuple[Sql, ...]:
    """Return the values of ``_COMPLETION_COLUMNS``, in their order.

    Log-probabilities that equal the raw ones, and versions that are all equal, are stored once.
    """
    logprobs, versions = pack_floats(completion.logprobs), completion.versions
    raw = logprobs if completion.raw_logprobs is completion.logprobs else pack_floats(completion.raw_logprobs)
    packed, size = pack_ints(versions), len(completion.token_ids)
    # Bytes are compared faster than an array is reduced.
    has_one = packed[4:] == packed[:-4]
    head = tail = None
    if len(versions):
        head, tail = (int(versions[0]),) * 2 if has_one else (int(versions.min()), int(versions.max()))
    return (
        completion.finish._value_,
        size,
        head,
        tail,
        pack_ints(completion.token_ids),
        logprobs,
        None if raw == logprobs else raw,
        None if has_one and len(versions) == size else packed,
        pack_alternatives(completion.top_logprobs) if completion.top_logprobs else None,
        None if completion.routed_experts is None else pack_experts(completion.routed_experts),
    )


def to_turn(row: Mapping[str, Any]) -> TurnEnded:
    """Return the turn with the columns ``row``."""
    output = row["output"]
    interaction = Interaction(
        id=to_text(row["interaction"]),
        order=row["request_order"],
        parent=to_text(row["parent"]),
        token_parent=to_text(row["token_parent"]),
        fork=None if row["fork"] is None else ForkReason(row["fork"]),
        messages=load_messages(row["messages"]),
        num_instructions=row["num_instructions"],
        num_kept=row["num_kept"],
        has_instructions=bool(row["has_instructions"]),
        prompt_suffix=unpack_ints(row["prompt_suffix"]),
        num_prompt_tokens=row["num_prompt_tokens"],
        completion=_completion(row),
        output=None if output is None else load_messages(output)[0],
        status=InteractionStatus(row["status"]),
        completed_order=row["completed_order"],
        reward=None if row["reward"] is None else float(row["reward"]),
        reward_scope=RewardScope(row["reward_scope"] or RewardScope.ANSWER),
        is_stored=bool(row["is_stored"]),
        tag=to_text(row["tag"]),
        failure=to_text(row["failure"]),
        sampling=None if row["sampling"] is None else SamplingDistribution(**load_json(row["sampling"])),
        digest=row["digest"],
    )
    return TurnEnded(
        session=to_text(row["session"]),
        interaction=interaction,
        frame=unpack_bytes(row["frame"]),  # type: ignore[arg-type]  # three went in
        ended_at=float(row["ended_at"]),
        attempt=None if row["attempt"] is None else Attempt(**load_json(row["attempt"])),
        siblings=() if row["siblings"] is None else tuple(load_json(row["siblings"])),
        num_cached_tokens=row["num_cached_tokens"],
        stop_sequence=to_text(row["stop_sequence"]),
        prompt_digest=row["prompt_digest"],
        asked=None if row["asked"] is None else tuple(load_json(row["asked"])),
        request=row["request"],
    )


def _completion(row: Mapping[str, Any]) -> Completion | None:
    if row["finish"] is None:
        return None
    token_ids = unpack_ints(row["token_ids"])
    logprobs = unpack_floats(row["logprobs"])
    versions = row["versions"]
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        raw_logprobs=logprobs if row["raw_logprobs"] is None else unpack_floats(row["raw_logprobs"]),
        versions=np.full(len(token_ids), row["head_version"] or 0) if versions is None else unpack_ints(versions),
        finish=FinishReason(row["finish"]),
        top_logprobs=unpack_alternatives(row["top_logprobs"]),
        routed_experts=unpack_experts(row["routed_experts"]),
    )


Statement: TypeAlias = tuple[str, tuple[Sql, ...]]


@frozen(kw_only=True)
class Table:
    """A table of events.

    ``is_kept`` is the SQL condition for rows to be restored.
    """

    name: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    keeps_place: bool = False
    is_kept: str = "true"

    @property
    def insertion(self) -> str:
        """The statement that writes a row: its number, then ``columns``."""
        names = ("seq", *self.columns)
        changed = names[1:] if self.keeps_place else names
        return (
            f"INSERT INTO {self.name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT ({', '.join(self.key)}) DO UPDATE SET "
            + ", ".join(f"{name} = excluded.{name}" for name in changed)
        )

    @property
    def page(self) -> str:
        """The statement that reads the next page of rows to restore: those after a number, up to a limit."""
        return (
            f"SELECT seq, {', '.join(self.columns)} FROM {self.name} AS t "
            f"WHERE seq > ? AND ({self.is_kept}) ORDER BY seq LIMIT ?"
        )

    def decode(self, row: Mapping[str, Any]) -> JournalEvent:
        """Return the event that is stored in a row of this table."""
        event: JournalEvent
        match self.name:
            case "turns":
                event = to_turn(row)
            case "sessions":
                key = load_json(row["sample_key"])
                event = SessionStarted(
                    session=to_text(row["session"]),
                    key_digest=row["key_digest"],
                    # Sessions of journals before version 6 have one key only.
                    completion_digest=row["completion_digest"] or b"",
                    sample_key=SampleKey(seed=key["seed"], path=tuple(key["path"])),
                    started_at=float(row["started_at"]),
                    group=to_text(row["group_id"]),
                    user=to_text(row["user"]),
                    metadata=load_json(row["metadata"]),
                )
            case "rewards":
                # Before version 5, rewards had no scope and count as rewards of answers.
                scope = RewardScope(row["scope"] or RewardScope.ANSWER)
                session, interaction = to_text(row["session"]), to_text(row["interaction"])
                event = RewardSet(session=session, interaction=interaction, reward=float(row["reward"]), scope=scope)
            case "endings":
                ended_at, is_final = float(row["ended_at"]), bool(row["is_final"])
                event = SessionEnded(session=to_text(row["session"]), ended_at=ended_at, is_final=is_final)
            case "forgotten":
                event = SessionForgotten(session=to_text(row["session"]))
            case "groups":
                group, sessions = to_text(row["group_id"]), tuple(load_json(row["sessions"]))
                event = GroupQueued(
                    group=group,
                    position=row["position"],
                    sessions=sessions,
                    data=load_json(row["data"]),
                    content=row["content"],
                )
            case "steps":
                groups = tuple(load_json(row["groups"]))
                event = StepLeased(version=row["version"], groups=groups, content=row["content"])
            case "consumed":
                group, is_trained = to_text(row["group_id"]), bool(row["is_trained"])
                event = GroupConsumed(group=group, version=row["version"], is_trained=is_trained)
            case _:
                event = VersionSaved(version=row["version"])
        return event


def encode(event: JournalEvent, seq: int, now: float) -> list[Statement]:
    """Return the SQL statements that store ``event`` as number ``seq``, at ``now`` seconds since 1970.

    Raises:
        JournalError: the event holds a value that cannot be stored, such as metadata that is not JSON.
    """
    try:
        if isinstance(event, TurnEnded):
            statements = [(_INSERTIONS["turns"], (seq, *turn_values(event)))]
        else:
            statements = list(_statements(event, seq, now))
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError, OverflowError) as error:
        raise JournalError(
            f"A {type(event).__name__} cannot be written to the journal: {error}. Metadata and problems of sessions "
            "must be JSON."
        ) from error
    # The log takes some of them, and no table does: the event would be acknowledged, and missing after a restart.
    for _, values in statements:
        for value in values:
            if type(value) is int and not _MIN_INTEGER <= value <= _MAX_INTEGER:
                name = type(event).__name__
                raise JournalError(f"A {name} cannot be written to the journal: an integer has more than 64 bits.")
    return statements


# ---------------------------------------------------------------------------------------------------- sessions

_NOT_GONE = "NOT EXISTS (SELECT 1 FROM gone_sessions g WHERE g.session = t.session)"
_NOT_FINISHED = "NOT EXISTS (SELECT 1 FROM finished_groups f WHERE f.group_id = t.group_id)"


def _statements(event: JournalEvent, seq: int, now: float) -> Iterator[Statement]:
    match event:
        case SessionStarted():
            yield from _start_row(event, seq)
        case RewardSet(session=session, interaction=interaction):
            values = (text(session), text(interaction), real(event.reward), event.scope)
            yield _INSERTIONS["rewards"], (seq, *values)
        case SessionEnded(session=session):
            yield _INSERTIONS["endings"], (seq, text(session), real(event.ended_at), event.is_final)
        case SessionForgotten(session=session):
            yield _INSERTIONS["forgotten"], (seq, text(session), now)
        case GroupQueued():
            yield from _group_row(event, seq)
        case StepLeased():
            yield _INSERTIONS["steps"], (seq, event.version, dump_json(event.groups), event.content)
        case GroupConsumed(group=group):
            yield _INSERTIONS["consumed"], (seq, text(group), event.version, event.is_trained, now)
        case VersionSaved():
            yield _INSERTIONS["saved_versions"], (seq, event.version)
        case _:
            raise TypeError("no table is made for such events")


def _start_row(event: SessionStarted, seq: int) -> Iterator[Statement]:
    # A forgotten session whose name is used again is a different session.
    session = text(event.session)
    for table in ("turns", "rewards", "endings", "sessions"):
        again = f"DELETE FROM {table} WHERE session = ?1 AND EXISTS (SELECT 1 FROM forgotten WHERE session = ?1)"
        yield again, (session,)
    yield "DELETE FROM forgotten WHERE session = ?", (session,)
    key = dump_json({"seed": event.sample_key.seed, "path": event.sample_key.path})
    columns = (real(event.started_at), text(event.user), text(event.group), key, dump_json(event.metadata))
    yield _INSERTIONS["sessions"], (seq, session, *columns, event.key_digest, event.completion_digest)


def _group_row(event: GroupQueued, seq: int) -> Iterator[Statement]:
    # A group that is queued again waits again, even if it was consumed before, and refers to other sessions.
    group = text(event.group)
    yield "DELETE FROM consumed WHERE group_id = ?", (group,)
    yield "DELETE FROM group_sessions WHERE group_id = ?", (group,)
    for session in dict.fromkeys(event.sessions):
        yield "INSERT INTO group_sessions (session, group_id) VALUES (?, ?)", (text(session), group)
    values = (event.position, dump_json(event.sessions), dump_json(event.data), event.content)
    yield _INSERTIONS["groups"], (seq, group, *values)


# ------------------------------------------------------------------------------------------------------ tables

TABLES: tuple[Table, ...] = (
    Table(
        name="sessions",
        key=("session",),
        columns=(
            "session",
            "started_at",
            "user",
            "group_id",
            "sample_key",
            "metadata",
            "key_digest",
            "completion_digest",
        ),
        keeps_place=True,
        is_kept=_NOT_GONE,
    ),
    Table(
        name="turns",
        key=("session", "interaction"),
        columns=TURN_COLUMNS,
        keeps_place=True,
        is_kept=_NOT_GONE,
    ),
    Table(
        name="rewards",
        key=("session", "interaction"),
        columns=("session", "interaction", "reward", "scope"),
        is_kept=_NOT_GONE,
    ),
    Table(
        name="endings",
        key=("session",),
        columns=("session", "ended_at", "is_final"),
        is_kept=_NOT_GONE,
    ),
    Table(name="forgotten", key=("session",), columns=("session", "forgotten_at"), is_kept=_NOT_GONE),
    Table(
        name="groups",
        key=("group_id",),
        columns=("group_id", "position", "sessions", "data", "content"),
        is_kept=_NOT_FINISHED,
    ),
    Table(
        name="steps",
        key=("version",),
        columns=("version", "groups", "content"),
        is_kept="version > ifnull((SELECT max(version) FROM saved_versions), version - 1)",
    ),
    Table(
        name="consumed",
        key=("group_id",),
        columns=("group_id", "version", "is_trained", "consumed_at"),
        is_kept=_NOT_FINISHED,
    ),
    Table(name="saved_versions", key=("version",), columns=("version",)),
)
"""All event tables."""

_INSERTIONS = {table.name: table.insertion for table in TABLES}
