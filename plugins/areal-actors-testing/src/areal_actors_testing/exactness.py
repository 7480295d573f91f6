"""An oracle that checks a session's training rows against the tokens that its engine saw and sampled.

For tests of exporters, proxies and agents, in this library and in yours: record the requests and samples of the engine,
and compare. It shares no code with ``cache``, which builds the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from attrs import field, frozen

from areal_actors.domain import (
    Floats,
    Ints,
    SessionRecord,
    Trajectory,
    Untrained,
    as_floats,
    as_ints,
)

_SHOWN = 8
"""Number of ids to show around the first difference."""


@frozen(kw_only=True, eq=False)
class Recorded:
    """The prompt and output of one request: ``prompt`` int32 [T], the others [n]; logprobs float32."""

    prompt: Ints = field(converter=as_ints)
    token_ids: Ints = field(converter=as_ints)
    logprobs: Floats = field(converter=as_floats)
    versions: Ints = field(converter=as_ints)

    @property
    def tokens(self) -> Ints:
        """Prompt and sampled tokens, int32 [T + n]."""
        return as_ints(np.concatenate([self.prompt, self.token_ids]))


Log = Mapping[str, Recorded]
"""Records of the engine by the id of the request, which is that of the interaction."""


def find_prompt_violations(record: SessionRecord, log: Log) -> Iterator[str]:
    """Yield interactions whose stored tokens differ from the engine's, or whose token parent is not a prefix."""
    for turn in record.interactions:
        if turn.id not in log:
            if turn.completion is not None:
                yield f"{turn.id} has sampled tokens, and the engine never saw it"
            continue
        seen = log[turn.id]
        if turn.num_prompt_tokens != len(seen.prompt):
            yield f"{turn.id} remembers {turn.num_prompt_tokens} prompt tokens, the engine saw {len(seen.prompt)}"
        stored = () if turn.completion is None else turn.completion.token_ids
        yield from _difference(f"{turn.id}: sampled and stored", seen.token_ids, as_ints(stored))
        if turn.token_parent is not None:
            whole = log[turn.token_parent].tokens
            yield from _difference(f"{turn.id}: the prompt, next to", whole, seen.prompt[: len(whole)])


def find_row_violations(rows: Sequence[Trajectory], untrained: Sequence[Untrained], log: Log) -> Iterator[str]:
    """Yield rows that are not a prompt and output of the engine, and sampled tokens not accounted for exactly once.

    ``rows`` and ``untrained`` are one export, in any style.
    """
    num_trained: Counter[str] = Counter()
    for number, row in enumerate(rows):
        yield from _check_row(f"row {number}", row, log, num_trained)
    listed = {str(entry.interaction): entry.num_tokens for entry in untrained}
    if len(listed) < len(untrained):
        yield "an interaction is listed twice as untrained"
    for name, seen in log.items():
        trained, left_out = num_trained[name], listed.get(name, 0)
        if trained + left_out != len(seen.token_ids) or (trained and left_out):
            yield f"{name}: {len(seen.token_ids)} tokens sampled, {trained} trained, {left_out} listed as untrained"


def _check_row(name: str, row: Trajectory, log: Log, num_trained: Counter[str]) -> Iterator[str]:
    unknown = [turn for turn in row.interactions if turn not in log]
    if unknown:
        yield f"{name} holds {unknown}, which the engine never saw"
        return
    # A row that is one path ends with the whole of its last turn.
    if row.predecessors is None:
        yield from _difference(f"{name}: ids", log[row.interactions[-1]].tokens, row.input_ids)
    expected = _Columns.neutral(len(row.input_ids))
    reached: set[int] = set()
    for index, turn in enumerate(row.interactions):
        seen = log[turn]
        if row.predecessors is not None and not len(seen.token_ids):
            # A turn without output has no tokens in the row; its prompt is part of the turns that continue it.
            continue
        places = _places(row, index, seen)
        reached.update(places)
        yield from _difference(f"{name}: {turn}, ids read and sampled", seen.tokens, row.input_ids[places])
        own = places[len(seen.prompt) :]
        expected.turns[own] = index
        expected.versions[own] = seen.versions[: len(own)]
        mask = row.loss_mask[own]
        if mask.any():
            expected.mask[own], expected.logprobs[own] = 1, seen.logprobs[: len(own)]
            num_trained[turn] += int(mask.sum())
    if row.predecessors is not None and len(reached) < len(row.input_ids):
        yield f"{name}: {len(row.input_ids) - len(reached)} tokens belong to no interaction"
    yield from _difference(f"{name}: turns", expected.turns, row.turns)
    yield from _difference(f"{name}: loss_mask", expected.mask, row.loss_mask)
    yield from _difference(f"{name}: logprobs", expected.logprobs, row.logprobs)
    yield from _difference(f"{name}: versions", expected.versions, row.versions)


def _places(row: Trajectory, index: int, seen: Recorded) -> list[int]:
    """Return the indices in a row of the tokens that turn ``index`` read and sampled."""
    if row.predecessors is None:
        return list(range(min(len(seen.tokens), len(row.input_ids))))
    own = np.flatnonzero(row.turns == index)
    if not len(own):
        return []
    path, token = [], int(own[-1])
    while token >= 0:
        path.append(token)
        token = int(row.predecessors[token])
    return path[::-1]


@frozen
class _Columns:
    """The expected columns of a row, except its ids."""

    turns: Ints
    mask: Ints
    logprobs: Floats
    versions: Ints

    @staticmethod
    def neutral(length: int) -> _Columns:
        return _Columns(
            np.full(length, -1, np.int32),
            np.zeros(length, np.int32),
            np.zeros(length, np.float32),
            np.full(length, -1, np.int32),
        )


def find_return_violations(styles: Mapping[str, Sequence[Trajectory]]) -> Iterator[str]:
    """Yield interactions whose trained tokens have different returns in different styles of export."""
    returns: dict[str, tuple[str, float]] = {}
    for style, rows in styles.items():
        turns = [(turn, row.returns[row.turns == index]) for row in rows for index, turn in enumerate(row.interactions)]
        for turn, values in turns:
            if not len(values):
                continue
            first, value = returns.setdefault(turn, (style, float(values[0])))
            # float32, as rows have them: the value of another row went through a Python float meanwhile.
            if (values != np.float32(value)).any():
                yield f"{turn}: return {value} in {first}, {values} in {style}"


def _difference(what: str, expected: Ints | Floats, found: Ints | Floats) -> Iterator[str]:
    """Describe the first index at which two arrays differ, bit by bit."""
    if np.array_equal(expected, found):
        return
    shared = min(len(expected), len(found))
    places = np.flatnonzero(expected[:shared] != found[:shared])
    at = int(places[0]) if len(places) else shared
    shown = slice(max(at - 2, 0), at + _SHOWN)
    yield (
        f"{what}: {len(expected)} expected, {len(found)} found; from {shown.start} on "
        f"{expected[shown].tolist()} expected, {found[shown].tolist()} found"
    )
