"""Attention of one step over the slots: decoding rows, then spans of prompts, in one flat batch of N tokens.

::

    columns of the batch     0 ......... num_decode .......... N
                             one token of    span of    span of
                             each row        prompt 1   prompt 2

A row attends to segments of main parts (read once for all rows that share them) and to its own tail. Each part yields
an output and the mass of its scores, by which the parts are joined exactly. A span attends causally to its own slot.
All models of ``forward`` call ``StepAttention``, so they agree on all of this.

``KeyValues`` stores keys and values: a main part per slot, and a tail row per decoding generation. The main part holds
the results of prefill, the tail the tokens sampled since. The tails of all rows begin in column 0, so that one batched
product serves every row's own tokens however long its prompt is; the main parts are read by segments that rows share.
When a generation ends, its tail is appended to its slot, which remains as a prefix cache. Both grow on demand.

``plan_sharing`` finds the rows of a batch that share a prefix. Rows that begin with the same tokens have the same keys
and values there (whichever slot holds them), and attention over a prefix that m rows share is one matrix product with m
times the queries instead of m products that each read the same memory. On CPUs, decoding is limited by memory
bandwidth, so a group of eight answers to one prompt decodes about four times as fast in attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from attrs import define, field, frozen
from torch.nn.functional import scaled_dot_product_attention

from areal_actors.domain import Ints


@frozen
class Span:
    """Batch columns [``offset``, ``offset + stop - start``) are tokens [``start``, ``stop``) of ``slot``."""

    slot: int
    start: int
    stop: int
    offset: int


@define(eq=False)
class DecodeLayout:
    """The decoding rows, in the order of ``plan``; rows from ``len(slots)`` to ``num_rows`` are padding.

    ``slots`` and ``tails`` (below ``num_tails``) are each row's slot and tail row, ``bases`` the number of tokens in
    its main part, ``columns`` the position of this step's token in its tail; tensors are int64 [live rows].
    ``is_alone``: nothing is computed across rows, so that no row depends on the others in the batch.
    """

    plan: SharingPlan
    slots: Sequence[int]
    tails: torch.Tensor
    num_tails: int
    bases: torch.Tensor
    num_rows: int
    is_alone: bool
    columns: torch.Tensor

    @property
    def num_live(self) -> int:
        """Return the number of rows that are not padding."""
        return len(self.slots)


@define(eq=False)
class StepAttention:
    """Writes this step's keys and values, and attends. One per step; ``attend`` is called once per layer, in order.

    ``is_padded`` reads the segments of single rows in one masked product, also where that reads much more than they
    have: more memory traffic, but far fewer kernels, which suits GPUs.
    """

    kv: KeyValues
    decode: DecodeLayout | None
    spans: Sequence[Span]
    is_padded: bool = False
    _tail_mask: torch.Tensor | None = field(default=None, init=False)
    _division: tuple[Sequence[Segment], _RowSegments | None] | None = field(default=None, init=False)

    def attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the attention output [Hq, N, Dv] of layer ``index``.

        The arguments are ``q`` [Hq, N, D], ``k`` [Hk, N, D] and ``v`` [Hk, N, Dv]; scores are multiplied by ``scale``.
        """
        layer = self.kv.layer(index, k, v)
        parts = []
        num_rows = 0
        if self.decode is not None:
            num_rows = self.decode.num_rows
            parts.append(self._attend_rows(layer, q[:, :num_rows], k[:, :num_rows], v[:, :num_rows], scale))
        for span in self.spans:
            at = slice(span.offset, span.offset + span.stop - span.start)
            layer.keys[span.slot, :, span.start : span.stop] = k[:, at]
            layer.values[span.slot, :, span.start : span.stop] = v[:, at]
            keys, values = layer.keys[span.slot, :, : span.stop], layer.values[span.slot, :, : span.stop]
            group = q.shape[0] // k.shape[0]
            if group > 1:
                keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
            mask = None
            if span.start:
                positions = torch.arange(span.stop, device=q.device)
                mask = positions[None] <= positions[span.start :, None]
            out = scaled_dot_product_attention(
                q[:, at].contiguous()[None],
                keys[None],
                values[None],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
            )
            parts.append(out[0])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _attend_rows(
        self, layer: LayerKeyValues, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        rows = self.decode
        assert rows is not None
        num_kv_heads, live = k.shape[0], rows.num_live
        layer.tail_keys[rows.tails, :, rows.columns] = k[:, :live].transpose(0, 1)
        layer.tail_values[rows.tails, :, rows.columns] = v[:, :live].transpose(0, 1)
        group = q.shape[0] // num_kv_heads
        # [Hk, rows * group, D]: the queries of neighbouring rows are adjacent, so those of a segment are one slice.
        queries = (q * scale).view(num_kv_heads, group, *q.shape[1:]).transpose(1, 2).flatten(1, 2)
        # The last level has the segments that are computed together.
        join = _Join.create(queries, v, depth=2 + rows.plan.depth)
        if self._division is None:
            self._division = _divide(rows, queries.device, is_padded=self.is_padded)
        segments, together = self._division
        for segment in segments:
            slot, at = rows.slots[segment.first], slice(segment.first * group, segment.last * group)
            keys = layer.keys[slot, :, segment.start : segment.stop]
            values = layer.values[slot, :, segment.start : segment.stop]
            # Level 0 of the join is the row's own tail.
            join.put(segment.level + 1, at, _attend_part(queries[:, at], keys, values))
        if together is not None:
            together.attend(layer, _by_row(queries, rows.num_live, group), join)
        self._attend_tails(layer, rows, queries, group, join)
        out = join.result().view(num_kv_heads, rows.num_rows, group, v.shape[2]).transpose(1, 2)
        return out.reshape(q.shape[0], rows.num_rows, v.shape[2])

    def _attend_tails(
        self, layer: LayerKeyValues, rows: DecodeLayout, queries: torch.Tensor, group: int, join: _Join
    ) -> None:
        """Attend to the rows' own sampled tokens, which are level 0 of the join."""
        if rows.is_alone:
            for place, (tail, column) in enumerate(zip(rows.tails.tolist(), rows.columns.tolist(), strict=True)):
                at = slice(place * group, (place + 1) * group)
                keys, values = layer.tail_keys[tail, :, : column + 1], layer.tail_values[tail, :, : column + 1]
                join.put(0, at, _attend_part(queries[:, at], keys, values))
            return
        # All tails begin in column 0, so that one product serves every row, however long its prompt is. It is in the
        # order of tail rows, so that keys and values are read in place; unused rows among them cost little.
        if self._tail_mask is None:
            ends = rows.columns.new_zeros(rows.num_tails).index_copy_(0, rows.tails, rows.columns)
            self._tail_mask = torch.arange(int(ends.max()) + 1, device=queries.device)[None] > ends[:, None]
        extent = self._tail_mask.shape[1]
        keys, values = layer.tail_keys[: rows.num_tails, :, :extent], layer.tail_values[: rows.num_tails, :, :extent]
        own = _by_row(queries, rows.num_live, group)
        own = own.new_zeros((rows.num_tails, *own.shape[1:])).index_copy_(0, rows.tails, own)
        part = _attend_part(own, keys, values, self._tail_mask[:, None, None])
        _put_rows(join, 0, _Part(part.output[rows.tails], part.mass[rows.tails], part.peak[rows.tails]))


def _divide(
    rows: DecodeLayout, device: torch.device, *, is_padded: bool
) -> tuple[Sequence[Segment], _RowSegments | None]:
    """Return the segments to compute one by one, and those of single rows if one product of all slots is faster.

    32 rows of 30 layers are some 10,000 operations by segments, whose calls take several times as long as their
    arithmetic.
    """
    segments = rows.plan.segments
    # A row has one at most: its last.
    single = [segment for segment in segments if segment.last - segment.first == 1]
    if rows.is_alone or len(single) < (1 if is_padded else MIN_BATCHED_ROWS):
        return segments, None
    together = _RowSegments.create(single, [rows.slots[segment.first] for segment in single], device)
    if not is_padded and together.is_hidden.numel() > MAX_UNUSED * sum(
        segment.stop - segment.start for segment in single
    ):
        return segments, None
    return [segment for segment in segments if segment.last - segment.first > 1], together


@frozen(eq=False, kw_only=True)
class _RowSegments:
    """Segments of single rows, which one masked product of all of their slots computes.

    Row ``places[i]`` has its segment in slot ``first + slots[i]``. The slots from ``first`` and the columns from
    ``start`` on are read in place, as many as ``is_hidden`` [S, L] has; hidden keys are outside the row's segment.
    """

    places: torch.Tensor
    slots: torch.Tensor
    first: int
    start: int
    is_hidden: torch.Tensor

    @classmethod
    def create(cls, segments: Sequence[Segment], slots: Sequence[int], device: torch.device) -> _RowSegments:
        """Return the segments of these slots, of which there is at least one."""
        first, num_slots = min(slots), max(slots) - min(slots) + 1
        start, stop = min(segment.start for segment in segments), max(segment.stop for segment in segments)
        starts, stops = torch.full((num_slots,), start), torch.full((num_slots,), stop)
        for slot, segment in zip(slots, segments, strict=True):
            starts[slot - first], stops[slot - first] = segment.start, segment.stop
        columns = torch.arange(start, stop)
        # Slots between them, which hold other tokens or none, hide nothing: their results are not used.
        is_hidden = (columns < starts[:, None]) | (columns >= stops[:, None])
        return cls(
            places=torch.tensor([segment.first for segment in segments], device=device),
            slots=torch.tensor(slots, device=device) - first,
            first=first,
            start=start,
            is_hidden=is_hidden.to(device),
        )

    def attend(self, layer: LayerKeyValues, queries: torch.Tensor, join: _Join) -> None:
        """Attend from ``queries`` [n, Hk, G, D], and put the result on the last level of the join."""
        num_slots, length = self.is_hidden.shape
        at = slice(self.first, self.first + num_slots), slice(None), slice(self.start, self.start + length)
        placed = queries.new_zeros((num_slots, *queries.shape[1:])).index_copy_(0, self.slots, queries[self.places])
        part = _attend_part(placed, layer.keys[at], layer.values[at], self.is_hidden[:, None, None])
        group = queries.shape[2]
        for target, found in ((join.outputs, part.output), (join.masses, part.mass), (join.peaks, part.peak)):
            by_row = target[-1].view(target.shape[1], -1, group, *target.shape[3:])
            by_row[:, self.places] = found[self.slots].transpose(0, 1).to(by_row.dtype)


@frozen(eq=False)
class _Part:
    """Attention to some of the keys, not normalised yet.

    Per query, ``output`` [..., Dv] is the sum of exp(score - ``peak``) times value, ``mass`` [...] the same sum without
    the values, and ``peak`` [...] the largest score.
    """

    output: torch.Tensor
    mass: torch.Tensor
    peak: torch.Tensor


@define(eq=False)
class _Join:
    """Parts of R queries, one per level: ``outputs`` [levels, Hk, R, Dv], ``masses`` and ``peaks`` [levels, Hk, R]."""

    outputs: torch.Tensor
    masses: torch.Tensor
    peaks: torch.Tensor

    @classmethod
    def create(cls, queries: torch.Tensor, v: torch.Tensor, *, depth: int) -> _Join:
        """Allocate room for ``depth`` parts of each query; a missing part has no weight."""
        shape = (depth, *queries.shape[:2])
        peaks = torch.full(shape, -torch.inf, dtype=torch.float32, device=queries.device)
        # Padding rows have no part at all: without this they would be NaN.
        peaks[0] = 0.0
        return cls(v.new_zeros((*shape, v.shape[2])), torch.zeros_like(peaks), peaks)

    def put(self, level: int, at: slice, part: _Part) -> None:
        """Set the part of the queries ``at``."""
        self.outputs[level, :, at] = part.output
        self.masses[level, :, at] = part.mass
        self.peaks[level, :, at] = part.peak

    def result(self) -> torch.Tensor:
        """Return the attention output [Hk, R, Dv] over all parts."""
        shares = torch.exp(self.peaks - self.peaks.amax(0))
        # The lower bound keeps padding rows, which have no mass, from dividing by zero.
        shares /= (self.masses * shares).sum(0).clamp_min(1e-30)
        return (self.outputs * shares.to(self.outputs.dtype)[..., None]).sum(0)


def _attend_part(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_hidden: torch.Tensor | None = None
) -> _Part:
    """Attend from scaled ``queries`` [..., R, D] to ``keys`` [..., L, D].

    Keys ``is_hidden`` (broadcast to [..., R, L]) are excluded.
    """
    scores = torch.matmul(queries, keys.transpose(-1, -2)).float()
    if is_hidden is not None:
        scores.masked_fill_(is_hidden, -torch.inf)
    peak = scores.amax(-1)
    weights = scores.sub_(peak[..., None]).exp_()
    return _Part(torch.matmul(weights.to(values.dtype), values), weights.sum(-1), peak)


def _by_row(queries: torch.Tensor, num_rows: int, group: int) -> torch.Tensor:
    """Return queries [Hk, R, D] by row, as [num_rows, Hk, group, D]."""
    num_heads, _, size = queries.shape
    return queries[:, : num_rows * group].view(num_heads, num_rows, group, size).transpose(0, 1)


def _put_rows(join: _Join, level: int, part: _Part) -> None:
    """Put a part in row order, [n, Hk, G, ...], into the join's order, [Hk, n G, ...]."""
    turned = [tensor.transpose(0, 1).flatten(1, 2) for tensor in (part.output, part.mass, part.peak)]
    join.put(level, slice(0, turned[0].shape[1]), _Part(*turned))


MIN_BATCHED_ROWS = 4
"""Segments of fewer rows are computed one by one, which copies no queries and results."""
MAX_UNUSED = 4
"""One product for all rows may read this many times the keys of their segments."""

COLUMN_STEP = 64
"""Capacities in tokens are multiples of this number: growth copies everything, so it should be rare."""
ROW_STEP = 8


@define(eq=False)
class LayerKeyValues:
    """One layer.

    ``keys`` and ``values`` are [slots, Hk, columns, D]; ``tail_keys`` and ``tail_values`` are [rows, Hk, columns, D].
    """

    keys: torch.Tensor
    values: torch.Tensor
    tail_keys: torch.Tensor
    tail_values: torch.Tensor


class KeyValues:
    """All layers. A layer is allocated at its first write, with the number and size of the heads written."""

    def __init__(self) -> None:
        self.layers: list[LayerKeyValues] = []
        self._main = (ROW_STEP, COLUMN_STEP)
        self._tail = (ROW_STEP, COLUMN_STEP)

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerKeyValues:
        """Return the layer ``index``. A new one is allocated to fit ``keys`` and ``values`` [Hk, N, D]."""
        while len(self.layers) <= index:
            shapes = (self._main, self._main, self._tail, self._tail)
            likes = (keys, values, keys, values)
            parts = [
                like.new_zeros((s[0], like.shape[0], s[1], like.shape[2]))
                for s, like in zip(shapes, likes, strict=True)
            ]
            self.layers.append(LayerKeyValues(*parts))
        return self.layers[index]

    def reserve(self, *, slots: int, columns: int) -> None:
        """Make room for ``slots`` slots of ``columns`` tokens."""
        if (wanted := _enlarge(self._main, slots, columns)) != self._main:
            self._main = wanted
            for layer in self.layers:
                layer.keys, layer.values = _grow(layer.keys, wanted), _grow(layer.values, wanted)

    def reserve_tail(self, *, rows: int, columns: int) -> None:
        """Make room for ``rows`` tail rows of ``columns`` tokens."""
        if (wanted := _enlarge(self._tail, rows, columns)) != self._tail:
            self._tail = wanted
            for layer in self.layers:
                layer.tail_keys, layer.tail_values = _grow(layer.tail_keys, wanted), _grow(layer.tail_values, wanted)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of a slot to another."""
        for layer in self.layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]

    def append_tail(self, row: int, slot: int, *, at: int, length: int) -> None:
        """Copy the first ``length`` tokens of a tail row into the slot, from column ``at`` on."""
        self.reserve(slots=slot + 1, columns=at + length)
        for layer in self.layers:
            layer.keys[slot, :, at : at + length] = layer.tail_keys[row, :, :length]
            layer.values[slot, :, at : at + length] = layer.tail_values[row, :, :length]


def _enlarge(have: tuple[int, int], rows: int, columns: int) -> tuple[int, int]:
    """Return a capacity for ``rows`` and ``columns``.

    A dimension that grows becomes at least half as large again, so that growth is rare.
    """
    new_rows = have[0] if rows <= have[0] else _round_up(max(rows, have[0] * 3 // 2), ROW_STEP)
    new_columns = have[1] if columns <= have[1] else _round_up(max(columns, have[1] * 3 // 2), COLUMN_STEP)
    return new_rows, new_columns


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _grow(old: torch.Tensor, capacity: tuple[int, int]) -> torch.Tensor:
    new = old.new_zeros((capacity[0], old.shape[1], capacity[1], old.shape[3]))
    new[: old.shape[0], :, : old.shape[2]] = old
    return new


MIN_SHARED_TOKENS = 32
"""A shorter segment costs more in calls than it saves in memory traffic."""
MAX_DEPTH = 4


@frozen
class Segment:
    """Tokens [``start``, ``stop``) that rows [``first``, ``last``) of the plan's order have in common, at ``level``.

    Level numbers identify the parts that are joined per row: no row has two segments of one level.
    """

    level: int
    start: int
    stop: int
    first: int
    last: int


@frozen
class SharingPlan:
    """``order[i]`` is the original index of the row at place i; the segments of a row tile its tokens exactly."""

    order: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def depth(self) -> int:
        """Return the number of levels."""
        return max((segment.level for segment in self.segments), default=-1) + 1


def common_prefix(first: Ints, second: Ints) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(first), len(second))
    if length == 0 or first[0] != second[0]:
        return 0
    differs = first[:length] != second[:length]
    at = int(differs.argmax())
    return at if differs[at] else length


def plan_alone(rows: Sequence[Ints]) -> SharingPlan:
    """Return a plan without sharing, in the given order."""
    segments = tuple(Segment(0, 0, len(row), i, i + 1) for i, row in enumerate(rows) if len(row))
    return SharingPlan(tuple(range(len(rows))), segments)


def plan_sharing(rows: Sequence[Ints], *, min_shared: int = MIN_SHARED_TOKENS) -> SharingPlan:
    """Return a plan that puts ``rows`` (token ids, each [T]) with a common prefix next to each other, in segments."""
    # Big-endian bytes sort like the token ids themselves.
    order = sorted(range(len(rows)), key=lambda i: rows[i].astype(">i4").tobytes())
    common = [common_prefix(rows[a], rows[b]) for a, b in pairwise(order)]
    lengths = [len(rows[i]) for i in order]
    segments: list[Segment] = []
    pending = [(0, len(rows), 0, 0)] if rows else []
    while pending:
        first, last, start, level = pending.pop()
        if last - first == 1 or level == MAX_DEPTH:
            segments.extend(
                Segment(level, start, lengths[i], i, i + 1) for i in range(first, last) if lengths[i] > start
            )
            continue
        shared = min([*common[first : last - 1], *lengths[first:last]])
        if shared - start >= min_shared:
            segments.append(Segment(level, start, shared, first, last))
            start, level = shared, level + 1
        cuts = [i + 1 for i in range(first, last - 1) if common[i] - start < min_shared]
        pending += [(a, b, start, level) for a, b in zip([first, *cuts], [*cuts, last], strict=True)]
    return SharingPlan(tuple(order), tuple(segments))
