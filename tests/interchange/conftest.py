"""Rows of branching sessions, as a step has trained them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import strategies as st

from areal_actors.cache import STYLES, export_trajectories
from areal_actors.domain import SessionRecord, TrainedRow, unfold
from areal_actors.errors import ExportError
from areal_actors.interchange import DumpedRow, dump_path, dump_row, write_rows
from areal_actors.testing.strategies import session_records


def decode(ids: Sequence[int]) -> str:
    """Tokens as numbers in brackets."""
    return "".join(f"[{token}]" for token in ids)


def trained_rows(record: SessionRecord, style: str) -> list[TrainedRow]:
    """The rows of a session with made-up numbers; those of the last row were not computed by the trainer."""
    rows = [
        branch.row
        for whole in export_trajectories(record, style=style, discount=1.0).trajectories
        for branch in unfold(whole)
    ]
    found = []
    for index, row in enumerate(rows):
        is_computed = (row.loss_mask == 1) & (index < len(rows) - 1)
        found.append(
            TrainedRow(
                trajectory=row,
                advantages=np.where(row.loss_mask == 1, 0.5 + index, 0),
                trainer_logprobs=np.where(is_computed, row.logprobs - 0.25, np.nan),
                task=index // 2,
                member=index % 2,
                episode_reward=1.0,
            )
        )
    return found


def dumped(rows: Sequence[TrainedRow], step: int = 1) -> list[DumpedRow]:
    """The rows as they are stored."""
    return [dump_row(row, decode, step=step, row=index, pieces={}) for index, row in enumerate(rows)]


@st.composite
def row_batches(draw: st.DrawFn) -> list[DumpedRow]:
    """The rows of one session with at least one trained token."""
    record = draw(session_records())
    style = draw(st.sampled_from(sorted(STYLES)))
    try:
        rows = trained_rows(record, style)
    except ExportError:
        rows = []
    return dumped(rows)


def branching_row(seed: int = 0) -> list[DumpedRow]:
    """Four rows of two groups: prompts of different lengths, a masked tool result, and a prefix that two rows share."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(5, 60, 4)
    rows = []
    for index in range(4):
        prompt = rng.integers(5, 60, 3 + index)
        tail = rng.integers(5, 60, 2 + index)
        ids = np.concatenate([prompt, shared, [7, 8], tail])
        is_first = index % 2 == 0
        turns = np.repeat([-1, 0, -1, 1], [len(prompt), 4, 2, len(tail)])
        mask = (turns == 1) | ((turns == 0) & is_first)
        rows.append(
            DumpedRow(
                step=3,
                row=index,
                task=index // 2,
                member=index % 2,
                session=f"s{index // 2}",
                reward=float(is_first),
                row_return=float(is_first),
                prompt_length=int(mask.argmax()),
                finish="length" if index == 3 else "stop",
                turn_names=("a", "b"),
                token_ids=ids,
                pieces=tuple(decode([token]) for token in ids),
                loss_mask=mask,
                logprobs=np.where(mask, -rng.uniform(0.1, 2, len(ids)), 0),
                trainer_logprobs=np.where(mask & (index != 1), -1.5, np.nan),
                advantages=np.where(mask, 1.0 if is_first else -1.0, 0),
                returns=np.where(mask, float(is_first), 0),
                temperatures=np.ones(len(ids)),
                versions=np.where(turns >= 0, 2, -1),
                turns=turns,
            )
        )
    return rows


@pytest.fixture
def write_step(tmp_path) -> Callable[..., dict[int, object]]:
    """Writes rows as the dump of a step, and returns the dumps by step."""

    def write(rows: Sequence[DumpedRow], step: int = 3) -> dict[int, object]:
        path = dump_path(tmp_path / "rows", step)
        write_rows(path, rows)
        return {step: path}

    return write
