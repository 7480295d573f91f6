"""Rows of training steps in parquet files: one file per step, one record per row, lists with one entry per token.

The lists of a record have the same length, so that ``unnest`` in SQL or ``explode`` in pandas makes a table with one
line per token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from attrs import field, fields, frozen

from areal_actors.domain import FinishReason, Floats, Ints, TrainedRow, array_equality, as_floats, as_ints
from areal_actors.errors import ExportError
from areal_actors.lib.atomic_write import atomic_path
from areal_actors.lib.telemetry import redact

if TYPE_CHECKING:
    import pyarrow as pa

Decode = Callable[[Ints], str]

INSTALL_PARQUET = "pip install 'areal_actors[parquet]'"

_STEP_FILE = re.compile(r"step-(\d+)\.parquet")


@frozen(kw_only=True)
class DumpedRow:
    """One row of T tokens, as it is stored. The docstrings of the fields are the documentation of the columns."""

    step: int
    """The training step, from 1."""
    row: int
    """The index of the row within the step."""
    task: int
    """The position of the problem in its source; the rows of one group have the same."""
    source: str = ""
    """The source of the problem, in a run with several."""
    member: int
    """The index of the episode in its group."""
    session: str
    """The beginning of the session's id; the whole id would grant access to the session."""
    tag: str | None = None
    """The name of the agent that asked for the last turn, if it sent one."""
    reward: float
    """The reward of the episode, as its agent reported it."""
    row_return: float
    """The return of the last turn of the row."""
    prompt_length: int
    """The number of tokens before the first trained one."""
    finish: str | None = None
    """Why the engine stopped the last turn: ``stop``, ``length``, …"""
    turn_names: tuple[str, ...]
    """The names of the interactions to which ``turns`` points."""
    token_ids: Ints = field(converter=as_ints, eq=array_equality)
    pieces: tuple[str, ...]
    """The text of each token by itself. Tokens that are parts of a character decode to U+FFFD."""
    loss_mask: Ints = field(converter=as_ints, eq=array_equality)
    """1 on the tokens that this row trains. A sampled token is 1 in one row only."""
    logprobs: Floats = field(converter=as_floats, eq=array_equality)
    """The log-probability with which the token was sampled; 0 off the mask."""
    trainer_logprobs: Floats = field(converter=as_floats, eq=False)
    """The trainer's log-probability; null off the mask and in rows that the step skipped."""
    advantages: Floats = field(converter=as_floats, eq=array_equality)
    """0 off the mask."""
    returns: Floats = field(converter=as_floats, eq=array_equality)
    temperatures: Floats = field(converter=as_floats, eq=array_equality)
    """The temperature of the turn that sampled the token; 1 elsewhere."""
    versions: Ints = field(converter=as_ints, eq=array_equality)
    """The version of the weights that sampled the token; -1 on tokens that were not sampled."""
    turns: Ints = field(converter=as_ints, eq=array_equality)
    """The index of the turn that sampled the token; -1 elsewhere."""
    turn_digests: tuple[str, ...] = ()
    """The digests of the turns as they were recorded; an empty text for a turn that has none."""
    seal: str = ""
    """The authentication code of the other columns; empty in rows that were not sealed."""

    @property
    def group(self) -> str:
        """The problem among those of all sources; the rows of one group in a step have the same."""
        return f"{self.source}-{self.task}" if self.source else str(self.task)

    @property
    def response_length(self) -> int:
        """The number of tokens from the first trained one to the end."""
        return len(self.token_ids) - self.prompt_length

    @property
    def text(self) -> tuple[str, str]:
        """The texts before the first trained token and from it on, joined from the pieces."""
        return "".join(self.pieces[: self.prompt_length]), "".join(self.pieces[self.prompt_length :])


def dump_row(trained: TrainedRow, decode: Decode, *, step: int, row: int, pieces: dict[int, str]) -> DumpedRow:
    """Return ``trained`` as it is stored. ``pieces`` caches the text of single tokens from call to call."""
    trajectory = trained.trajectory
    ids = trajectory.input_ids.tolist()
    for token in {*ids} - pieces.keys():
        pieces[token] = decode(as_ints([token]))
    infos = trajectory.turn_infos
    sampled = [trained.temperature if info.sampling is None else info.sampling.temperature for info in infos]
    known = np.array([*sampled, 1.0] if infos else [1.0], dtype=np.float32)
    is_known = trajectory.turns >= 0 if infos else np.zeros(len(ids), dtype=bool)
    temperatures = known[np.where(is_known, trajectory.turns, -1)]
    # Rows that a workflow built from tensors do not describe their turns.
    if not infos:
        temperatures = np.where(trajectory.loss_mask == 1, trained.temperature, 1.0)
    finish: FinishReason | None = infos[-1].finish if infos else None
    return DumpedRow(
        step=step,
        row=row,
        task=trained.task,
        source=trained.source,
        member=trained.member,
        session=redact(f"session {trajectory.session}").removeprefix("session "),
        tag=trajectory.tag,
        reward=trained.episode_reward,
        row_return=trajectory.reward,
        prompt_length=int(trajectory.loss_mask.argmax()) if trajectory.num_trained_tokens else len(ids),
        finish=None if finish is None else str(finish),
        turn_names=tuple(map(str, trajectory.interactions)),
        token_ids=trajectory.input_ids,
        pieces=tuple(pieces[token] for token in ids),
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        trainer_logprobs=trained.trainer_logprobs,
        advantages=trained.advantages,
        returns=trajectory.returns,
        temperatures=temperatures,
        versions=trajectory.versions,
        turns=trajectory.turns,
        turn_digests=tuple(info.digest or "" for info in infos),
    )


# ------------------------------------------------------------------------------------------------------- files


def has_parquet() -> bool:
    """Return whether pyarrow is installed."""
    from importlib.util import find_spec

    return find_spec("pyarrow") is not None


def _schema() -> pa.Schema:
    import pyarrow as pa

    scalars = {"int": pa.int64(), "str": pa.string(), "str | None": pa.string(), "float": pa.float64()}
    lists = {"tuple[str, ...]": pa.string(), "Ints": pa.int32(), "Floats": pa.float32()}
    columns = []
    for column in fields(DumpedRow):
        kind = str(column.type)
        columns.append(pa.field(column.name, scalars[kind] if kind in scalars else pa.list_(lists[kind])))
    return pa.schema(columns)


def write_rows(path: Path, rows: Iterable[DumpedRow]) -> None:
    """Write a parquet file, completely or not at all. Raises ``OSError``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Types come from the schema: a step without rows has no values to infer them from.
    schema = _schema()
    found = list(rows)
    columns = []
    for column in schema:
        values = [getattr(row, column.name) for row in found]
        # NaN would poison every mean; null is left out of it.
        if column.name == "trainer_logprobs":
            values = [[None if np.isnan(value) else value for value in array] for array in values]
        columns.append(pa.array(values, type=column.type))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as partial:
        pq.write_table(pa.Table.from_arrays(columns, schema=schema), partial, compression="zstd")


def read_rows(path: Path) -> list[DumpedRow]:
    """Return the rows of one file. Raises ``ExportError`` if it is no such file, and ``OSError``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise ExportError(f"{path} is not a dump of rows: {error}") from error
    names = _schema().names
    if missing := [name for name in names if name not in table.column_names]:
        raise ExportError(f"{path} is not a dump of rows: it lacks the columns {', '.join(missing)}.")
    rows = []
    for record in table.select(names).to_pylist():
        logprobs = [np.nan if value is None else value for value in record["trainer_logprobs"]]
        texts = {name: tuple(record[name]) for name in ("turn_names", "pieces", "turn_digests")}
        rows.append(DumpedRow(**{**record, **texts, "trainer_logprobs": logprobs}))
    return rows


def find_dumps(directory: Path) -> dict[int, Path]:
    """Return the files in ``directory`` by their steps, in order."""
    found = ((_STEP_FILE.fullmatch(path.name), path) for path in directory.glob("step-*.parquet"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def dump_path(directory: Path, step: int) -> Path:
    """Return the file of a step."""
    return directory / f"step-{step:06d}.parquet"
