"""Check offline that the rows of a run are the recorded answers: journal, dumps, and what binds them.

Each check names the first difference that it finds in a row or a turn, and goes on with the next one.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from attrs import asdict, define, evolve, field, frozen

from areal_actors.cache import total_reward
from areal_actors.domain import (
    Interaction,
    InteractionId,
    InteractionStatus,
    SessionId,
    SessionRecord,
    TurnEnded,
    create_token_hash,
    digest_tokens,
    is_turn_digest,
)
from areal_actors.errors import ConfigError, ExportError, ProtocolError, RunDirectoryError
from areal_actors.interchange import (
    INSTALL_PARQUET,
    DumpedRow,
    changed_columns,
    find_dumps,
    has_parquet,
    read_rows,
    read_seal_key,
)
from areal_actors.journal.tables import decode_row
from areal_actors.kernel.remote.codec import Codec
from areal_actors.lib.telemetry import redact
from areal_actors.run.directory import find_run


@frozen(kw_only=True)
class Difference:
    """One thing that is not as it was recorded: ``there`` is the recorded value, ``here`` the found one, if known."""

    where: str
    """The file."""
    what: str
    row: int | None = None
    turn: str | None = None
    column: str | None = None
    token: int | None = None
    there: str | None = None
    here: str | None = None

    def __str__(self) -> str:
        """Return one line."""
        place = [self.where]
        for label in ("row", "turn", "column", "token"):
            value = getattr(self, label)
            place += [f"{label} {value}"] if value is not None else []
        values = "" if self.there is None else f" (recorded {self.there}, found {self.here})"
        return f"{', '.join(place)}: {self.what}{values}"


@define(kw_only=True)
class Verification:
    """What was checked, and every difference. Without a key (``is_sealed``), no seal was checked."""

    run: str
    is_sealed: bool = False
    num_dumps: int = 0
    num_rows: int = 0
    num_unsealed_rows: int = 0
    num_trained_tokens: int = 0
    num_checked_tokens: int = 0
    """Trained tokens whose ids, log-probabilities and versions agree with the digest of their turn."""
    num_recorded_tokens: int = 0
    """Trained tokens that were also compared with their turn in the journal."""
    num_turns: int = 0
    """Completed turns in the journal."""
    num_turns_without_digest: int = 0
    """Turns of rows and of the journal that an earlier release recorded, or that a program built."""
    num_restated_turns: int = 0
    """Turns in the journal whose versions were lowered by a resume."""
    differences: list[Difference] = field(factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every row has a valid seal and every turn a digest."""
        return self.is_sealed and not (self.num_unsealed_rows or self.num_turns_without_digest or self.differences)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict for ``json.dumps``."""
        return asdict(self) | {"is_complete": self.is_complete}


def verify_run(path: Path) -> Verification:
    """Check the dumps and the journal of the run in ``path``. Nothing is written.

    Raises:
        RunDirectoryError: ``path`` holds no run, or one with neither rows nor a journal.
        ConfigError: there are dumps, and pyarrow is not installed.
        OSError: a file cannot be read.
    """
    directory = find_run(path)
    found = Verification(run=str(path))
    turns: dict[InteractionId, list[TurnEnded]] = defaultdict(list)
    rewards: dict[SessionId, float] = {}
    if directory.journal.exists():
        sessions: dict[SessionId, dict[InteractionId, Interaction]] = defaultdict(dict)
        for turn in verify_turns(_read_turns(directory.journal, found), found, where=directory.journal.name):
            turns[turn.interaction.id].append(turn)
            sessions[turn.session][turn.interaction.id] = turn.interaction
        rewards = {
            session: total_reward(SessionRecord(id=session, interactions=tuple(known.values())))
            for session, known in sessions.items()
            # The reward of a session is known only if no turn of it is missing.
            if all(turn.parent is None or turn.parent in known for turn in known.values())
        }
    dumps = find_dumps(directory.rows)
    if not dumps and not directory.journal.exists():
        raise RunDirectoryError(
            f"The run in {path} has nothing to verify: it needs rows, which logging.row_dumps.every_steps=1 writes "
            "during training, or the journal of a service."
        )
    if dumps and not has_parquet():
        raise ConfigError(f"Rows are stored as parquet, which needs pyarrow: {INSTALL_PARQUET}")
    try:
        key = read_seal_key(directory.rows_key)
    except ValueError:
        key = None
        found.differences.append(Difference(where=directory.rows_key.name, what="it is not a key"))
    found.is_sealed = key is not None
    for step, file in dumps.items():
        found.num_dumps += 1
        try:
            rows = read_rows(file)
        except (ExportError, ValueError, TypeError) as error:
            found.differences.append(Difference(where=file.name, what=f"it cannot be read: {error}"))
            continue
        verify_rows(rows, found, where=file.name, step=step, key=key, recorded=turns, rewards=rewards)
    return found


# --------------------------------------------------------------------------------------------------------- rows


def verify_rows(
    rows: Sequence[DumpedRow],
    found: Verification,
    *,
    where: str,
    step: int,
    key: bytes | None = None,
    recorded: Mapping[InteractionId, Sequence[TurnEnded]] | None = None,
    rewards: Mapping[SessionId, float] | None = None,
) -> None:
    """Check the rows of one step, and add counts and differences to ``found``."""
    trained: dict[tuple[str, int, str, str], int] = {}
    for index, row in enumerate(rows):
        found.num_rows += 1
        found.num_trained_tokens += int((row.loss_mask == 1).sum())

        def report(what: str, index: int = index, **place: Any) -> None:
            found.differences.append(Difference(where=where, row=index, what=what, **place))

        if (row.step, row.row) != (step, index):
            report("it is the row of another place", there=f"step {row.step} row {row.row}", here=f"step {step}")
        if key is None or not row.seal:
            found.num_unsealed_rows += 1
        elif (changed := changed_columns(row, key, num_rows=len(rows))) is not None:
            names = ", ".join(changed)
            report("it is not as it was sealed", column=names or None)
            if not names:
                report("its step had another number of rows, or its seal was changed")
        problem = _shape_problem(row)
        if problem is not None:
            report(problem)
            continue
        _verify_spans(row, found, report, recorded or {})
        _verify_reward(row, report, recorded or {}, rewards or {})
        for position in np.unique(row.turns[row.loss_mask == 1]).tolist():
            place = row.group, row.member, row.session, row.turn_names[position]
            if (first := trained.setdefault(place, index)) != index:
                report(f"row {first} trains the same turn", turn=row.turn_names[position])


def _shape_problem(row: DumpedRow) -> str | None:
    """Return why the columns of a row do not fit each other; ``None`` if they do."""
    names = ("loss_mask", "logprobs", "advantages", "returns", "temperatures", "versions", "turns")
    length = len(row.token_ids)
    for name in names:
        if len(getattr(row, name)) != length:
            return f"its {name} has {len(getattr(row, name))} entries for {length} tokens"
    if length and not -1 <= int(row.turns.min()) <= int(row.turns.max()) < max(len(row.turn_names), 1):
        return "its turns point to names that it does not have"
    if row.turn_digests and len(row.turn_digests) != len(row.turn_names):
        return f"it has {len(row.turn_digests)} digests for {len(row.turn_names)} turns"
    if not np.isin(row.loss_mask, (0, 1)).all():
        return "its loss_mask has other values than 0 and 1"
    return None


Report = Callable[..., None]


def _verify_spans(
    row: DumpedRow, found: Verification, report: Report, recorded: Mapping[InteractionId, Sequence[TurnEnded]]
) -> None:
    digests = row.turn_digests or ("",) * len(row.turn_names)
    # Rows that a program built from its own tensors have no digests, and may train any token.
    for name, neutral in (("loss_mask", 0), ("versions", -1)) if any(digests) else ():
        column = getattr(row, name)
        wrong = np.flatnonzero((row.turns < 0) & (column != neutral))
        if len(wrong):
            token = int(wrong[0])
            report("no turn sampled this token", column=name, token=token, there=str(neutral), here=str(column[token]))
    for position, (label, digest) in enumerate(zip(row.turn_names, digests, strict=True)):
        where = np.flatnonzero(row.turns == position)
        if not digest:
            found.num_turns_without_digest += 1
        elif len(where) and int(where[-1]) - int(where[0]) + 1 != len(where):
            report("the tokens of the turn are not in one piece", turn=label)
        elif len(where):
            # An answer without tokens has nothing to check.
            turn = _find_turn(recorded, label, row.session)
            span = slice(int(where[0]), int(where[-1]) + 1)
            problem = _span_problem(row, span, position, turn)
            if problem is not None:
                report(problem.pop("what"), turn=label, **problem)
            elif row.loss_mask[span.start] == 1:
                found.num_checked_tokens += len(where)
                found.num_recorded_tokens += len(where) if turn is not None else 0


def _verify_reward(
    row: DumpedRow,
    report: Report,
    recorded: Mapping[InteractionId, Sequence[TurnEnded]],
    rewards: Mapping[SessionId, float],
) -> None:
    turn = _find_turn(recorded, row.turn_names[-1], row.session) if row.turn_names else None
    total = None if turn is None else rewards.get(turn.session)
    if total is not None and np.float32(total) != np.float32(row.reward):
        what = "it is not the sum of the session's rewards in the journal"
        report(what, column="reward", there=str(total), here=str(row.reward))


def _span_problem(row: DumpedRow, span: slice, position: int, turn: TurnEnded | None) -> dict[str, Any] | None:
    """Return the first difference of a row's turn, as arguments of a ``Difference``; ``None`` if there is none."""
    digest, name = row.turn_digests[position], InteractionId(row.turn_names[position])
    mask = row.loss_mask[span]
    if (mask != mask[0]).any():
        token = span.start + int((mask == 0).argmax())
        return {"what": "the turn is trained in part", "column": "loss_mask", "token": token, "there": "1", "here": "0"}
    if turn is not None and (problem := _journal_problem(row, span, position, turn)) is not None:
        return problem
    if digest_tokens(row.token_ids[: span.stop]) != digest.split(":")[0]:
        return {"what": f"the ids up to token {span.stop} are not those of the turn", "column": "token_ids"}
    # As context, a turn has no log-probabilities in the row.
    if mask[0] == 1 and not is_turn_digest(digest, name, logprobs=row.logprobs[span], versions=row.versions[span]):
        return {"what": "the log-probabilities or versions are not those of the turn"}
    return None


def _find_turn(recorded: Mapping[InteractionId, Sequence[TurnEnded]], name: str, session: str) -> TurnEnded | None:
    """Return the turn of this id, in the session that a row names by the beginning of its id."""
    turns = recorded.get(InteractionId(name), ())
    named = [turn for turn in turns if redact(f"session {turn.session}").removeprefix("session ") == session]
    return named[0] if len(named) == 1 else None


def _journal_problem(row: DumpedRow, span: slice, position: int, turn: TurnEnded) -> dict[str, Any] | None:
    """Return the first token of a row's turn that differs from the journal, as ``_span_problem`` does."""
    completion = turn.interaction.completion
    assert completion is not None, "only completed turns are compared"
    digest, recorded = row.turn_digests[position], turn.interaction.digest or ""
    columns: dict[str, npt.NDArray[Any]] = {"token_ids": completion.token_ids}
    if row.loss_mask[span.start] == 1:
        columns["logprobs"] = completion.logprobs
    # A resume may restate the versions of a turn that was trained before.
    if digest == recorded:
        columns["versions"] = completion.versions
    for column, values in columns.items():
        here = getattr(row, column)[span]
        if len(here) != len(values):
            return {"what": "the turn has another length", "there": str(len(values)), "here": str(len(here))}
        wrong = np.flatnonzero(here != values)
        if len(wrong):
            at = int(wrong[0])
            found = {"there": str(values[at]), "here": str(here[at])}
            return {"what": "it differs from the journal", "column": column, "token": span.start + at, **found}
    if recorded and not digest.startswith(recorded) and not recorded.startswith(digest):
        return {"what": "its digest differs from the journal's", "there": recorded, "here": digest}
    return None


# ------------------------------------------------------------------------------------------------------ journal


_REWARDS = "SELECT session, interaction, reward FROM rewards"


def _read_turns(path: Path, found: Verification) -> Iterator[TurnEnded]:
    """Yield the completed turns of a journal, which may be in use."""
    codec = Codec()
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            # A session is deleted as a whole; turns that arrive later are removed when the journal is opened.
            known = "session IN (SELECT session FROM sessions)"
            query = f"SELECT session, interaction, messages, output, record FROM turns WHERE {known}"  # noqa: S608
            # One transaction sees one state of all tables, while a service writes.
            connection.execute("BEGIN")
            set_later = {(session, name): reward for session, name, reward in connection.execute(_REWARDS)}
            for session, name, *row in connection.execute(f"{query} ORDER BY request_order"):
                try:
                    turn = cast("TurnEnded", decode_row(codec, "turns", *row))
                    if (reward := set_later.get((session, name))) is not None:
                        turn = evolve(turn, interaction=evolve(turn.interaction, reward=float(reward)))
                    yield turn
                except (ValueError, TypeError, ProtocolError) as error:
                    what = f"it cannot be read: {error}"
                    found.differences.append(Difference(where=path.name, turn=str(name), what=what))
    except sqlite3.Error as error:
        found.differences.append(Difference(where=path.name, what=f"it cannot be read: {error}"))


def verify_turns(turns: Iterator[TurnEnded], found: Verification, *, where: str) -> Iterator[TurnEnded]:
    """Check turns, parents first within a session; yield the completed ones, and add counts and differences."""
    hashes: dict[tuple[SessionId, InteractionId | None], Any] = {}
    for event in turns:
        turn, completion = event.interaction, event.interaction.completion
        if turn.status is not InteractionStatus.COMPLETED or completion is None:
            continue
        found.num_turns += 1
        yield event
        parent = create_token_hash() if turn.token_parent is None else hashes.get((event.session, turn.token_parent))
        if parent is not None:
            digest = hashes[event.session, turn.id] = parent.copy()
            digest.update(turn.prompt_suffix.data)
            digest.update(completion.token_ids.data)
        if turn.digest is None:
            found.num_turns_without_digest += 1
            continue
        tokens, _, _, *restated = turn.digest.split(":")
        found.num_restated_turns += bool(restated)
        what = None
        if parent is None:
            what = "the turn that it follows is missing"
        elif hashes[event.session, turn.id].hexdigest() != tokens:
            what = "its ids, or those before it, are not as they were recorded"
        elif not is_turn_digest(
            turn.digest,
            turn.id,
            logprobs=completion.logprobs,
            versions=completion.versions,
            raw_logprobs=completion.raw_logprobs,
        ):
            what = "its log-probabilities or versions are not as they were recorded"
        if what is not None:
            found.differences.append(Difference(where=where, turn=str(turn.id), what=what))


def format_verification(found: Verification) -> str:
    """Return the counts and all differences as text."""
    num_sealed = found.num_rows - found.num_unsealed_rows
    seals = f"{num_sealed} sealed" if found.is_sealed else "there is no key, so no seal was checked"
    checked = f"{found.num_checked_tokens} agree with the digests of their turns"
    lines = [
        f"{found.num_dumps} dumps with {found.num_rows} rows: {seals}",
        f"{found.num_trained_tokens} trained tokens: {checked}, {found.num_recorded_tokens} also with the journal",
        f"{found.num_turns} turns in the journal, {found.num_restated_turns} with versions that a resume restated",
    ]
    if found.num_turns_without_digest:
        lines.append(f"{found.num_turns_without_digest} turns have no digest")
    lines += [f"DIFFERENCE {difference}" for difference in found.differences]
    lines.append(f"{len(found.differences)} differences" if found.differences else "No difference was found.")
    return "\n".join(lines)
