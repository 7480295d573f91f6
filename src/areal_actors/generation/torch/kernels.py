"""The operations of ``operations.py`` as Triton kernels, for CUDA devices. Import only where Triton is installed.

Decoding reads each sequence's own keys and values, and no more: a program takes a slice of one row's tokens for all
query heads that share a key head, so that keys are read once per group, and a second kernel joins the slices by their
log-sum-exp. The length is read on the device, which is what lets one CUDA graph serve all lengths. Sums are float32.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton is installed with torch for GPUs only; kernels are launched by indexing them with a grid.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areal_actors.generation.torch.operations import Cells, HeadNorms, SlotCache, SpanLayout

_LOG2_E = 1.4426950408889634
_MIN_DOT = 16
"""The smallest dimension of a matrix product on tensor cores."""
_MAX_SLICES = 32
_PROGRAMS_WANTED = 512
"""Programs that keep a large GPU busy while it waits for memory: about four for each of its 132 processors."""


@triton.jit
def _normalize(residual, update, weight, out, eps, SIZE: tl.constexpr, HAS_UPDATE: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    inside = places < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + places
    x = tl.load(residual + at, mask=inside, other=0.0)
    if HAS_UPDATE:
        x += tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + at, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    w = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (x * scale * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    qkv,
    q,
    keys,
    values,
    slots,
    positions,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    slot_stride,
    head_stride,
    NUM_Q: tl.constexpr,
    NUM_K: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    half = SIZE // 2
    places = tl.arange(0, BLOCK)
    inside = places < half
    source = qkv + (row * (NUM_Q + 2 * NUM_K) + head) * SIZE + places
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + half, mask=inside, other=0.0)
    cell = slot * slot_stride + position * SIZE + places
    if head >= NUM_Q + NUM_K:
        target = values + cell + (head - NUM_Q - NUM_K) * head_stride
        tl.store(target, first, mask=inside)
        tl.store(target + half, second, mask=inside)
    else:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        if HAS_NORMS:
            scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / SIZE + eps)
            is_query = places * 0 + head < NUM_Q
            a_weight = tl.load(q_norm + places, mask=inside & is_query, other=0.0).to(tl.float32)
            a_weight += tl.load(k_norm + places, mask=inside & ~is_query, other=0.0).to(tl.float32)
            b_weight = tl.load(q_norm + half + places, mask=inside & is_query, other=0.0).to(tl.float32)
            b_weight += tl.load(k_norm + half + places, mask=inside & ~is_query, other=0.0).to(tl.float32)
            a = a * scale * a_weight
            b = b * scale * b_weight
        c = tl.load(cos + position * half + places, mask=inside, other=0.0)
        s = tl.load(sin + position * half + places, mask=inside, other=0.0)
        turned_a = (a * c - b * s).to(q.dtype.element_ty)
        turned_b = (b * c + a * s).to(q.dtype.element_ty)
        if head < NUM_Q:
            to_query = q + (row * NUM_Q + head) * SIZE + places
            tl.store(to_query, turned_a, mask=inside)
            tl.store(to_query + half, turned_b, mask=inside)
        else:
            to_key = keys + cell + (head - NUM_Q) * head_stride
            tl.store(to_key, turned_a, mask=inside)
            tl.store(to_key + half, turned_b, mask=inside)


@triton.jit
def _attend_slices(
    q,
    keys,
    values,
    slots,
    positions,
    out,
    masses,
    scale,
    slot_stride,
    head_stride,
    NUM_Q: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1)
    part = tl.program_id(2)
    slot = tl.load(slots + row)
    length = (tl.load(positions + row) + 1).to(tl.int32)
    width = tl.cdiv(tl.cdiv(length, NUM_SLICES), BLOCK_L) * BLOCK_L
    start = part * width
    stop = tl.minimum(start + width, length)

    in_group = tl.arange(0, BLOCK_G)
    in_head = tl.arange(0, BLOCK_D)
    in_block = tl.arange(0, BLOCK_L)
    is_head = in_head < SIZE
    heads = key_head * GROUP + in_group
    is_query = (in_group < GROUP)[:, None] & is_head[None, :]
    queries = tl.load(q + (row * NUM_Q + heads)[:, None] * SIZE + in_head[None, :], mask=is_query, other=0.0)
    base = slot * slot_stride + key_head * head_stride

    peak = tl.full([BLOCK_G], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    total = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for at in range(start, stop, BLOCK_L):
        tokens = at + in_block
        is_token = tokens < stop
        cells = base + tokens[:, None] * SIZE + in_head[None, :]
        is_cell = is_token[:, None] & is_head[None, :]
        k = tl.load(keys + cells, mask=is_cell, other=0.0)
        v = tl.load(values + cells, mask=is_cell, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(is_token[None, :], scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        mass = mass * shrink + tl.sum(weights, axis=1)
        total = total * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        peak = higher
    # An empty slice has no mass; its weight in the join is exp2(-inf) = 0.
    total = total / tl.where(mass > 0, mass, 1.0)[:, None]
    mass = peak + tl.log2(tl.where(mass > 0, mass, 1.0))
    cell = (row * NUM_Q + heads) * NUM_SLICES + part
    tl.store(out + cell[:, None] * SIZE + in_head[None, :], total, mask=is_query)
    tl.store(masses + cell, mass, mask=in_group < GROUP)


@triton.jit
def _join_slices(parts, masses, out, SIZE: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK_D: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    slices = tl.arange(0, NUM_SLICES)
    in_head = tl.arange(0, BLOCK_D)
    is_head = in_head < SIZE
    mass = tl.load(masses + at * NUM_SLICES + slices)
    weights = tl.exp2(mass - tl.max(mass, axis=0))
    cells = (at * NUM_SLICES + slices)[:, None] * SIZE + in_head[None, :]
    part = tl.load(parts + cells, mask=(slices >= 0)[:, None] & is_head[None, :], other=0.0)
    joined = tl.sum(part * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out + at * SIZE + in_head, joined.to(out.dtype.element_ty), mask=is_head)


@triton.jit
def _attend_tiles(
    q,
    keys,
    values,
    tiles,
    out,
    scale,
    slot_stride,
    head_stride,
    NUM_Q: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(tiles + 4 * tile).to(tl.int64)
    position = tl.load(tiles + 4 * tile + 1)
    column = tl.load(tiles + 4 * tile + 2).to(tl.int64)
    count = tl.load(tiles + 4 * tile + 3)

    in_tile = tl.arange(0, BLOCK_M)
    in_head = tl.arange(0, BLOCK_D)
    in_block = tl.arange(0, BLOCK_L)
    is_head = in_head < SIZE
    is_query = (in_tile < count)[:, None] & is_head[None, :]
    cells = ((column + in_tile) * NUM_Q + head)[:, None] * SIZE + in_head[None, :]
    queries = tl.load(q + cells, mask=is_query, other=0.0)
    base = slot * slot_stride + (head // GROUP) * head_stride
    stop = position + count

    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for at in range(0, stop, BLOCK_L):
        tokens = at + in_block
        is_cell = (tokens < stop)[:, None] & is_head[None, :]
        at_cells = base + tokens[:, None] * SIZE + in_head[None, :]
        k = tl.load(keys + at_cells, mask=is_cell, other=0.0)
        v = tl.load(values + at_cells, mask=is_cell, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
        # The first token is before every query, so that no row of scores is empty in the first turn.
        scores = tl.where(tokens[None, :] <= (position + in_tile)[:, None], scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        mass = mass * shrink + tl.sum(weights, axis=1)
        total = total * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        peak = higher
    total = total / mass[:, None]
    tl.store(out + cells, total.to(out.dtype.element_ty), mask=is_query)


@triton.jit
def _gate(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + places, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


class TritonOperations:
    """See ``Operations``. All tensors are contiguous, on one CUDA device (or on the CPU under Triton's interpreter)."""

    tile_size = 64

    def normalize(
        self, residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See ``Operations.normalize``."""
        out = torch.empty_like(residual, dtype=weight.dtype)
        size = residual.shape[1]
        block = triton.next_power_of_2(size)
        _normalize[(len(residual),)](
            residual,
            residual if update is None else update,
            weight,
            out,
            eps,
            SIZE=size,
            HAS_UPDATE=update is not None,
            BLOCK=block,
            num_warps=8 if block >= 2048 else 4,  # noqa: PLR2004
        )
        return out

    def rotate(
        self,
        qkv: torch.Tensor,
        cache: SlotCache,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cells: Cells,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        """See ``Operations.rotate``."""
        num_kv_heads, size = cache.keys.shape[1], cache.keys.shape[3]
        num_heads = qkv.shape[1] // size - 2 * num_kv_heads
        q = qkv.new_empty((len(qkv), num_heads, size))
        _rotate[(len(qkv), num_heads + 2 * num_kv_heads)](
            qkv,
            q,
            cache.keys,
            cache.values,
            cells.slots,
            cells.positions,
            *rotation,
            qkv if norms is None else norms.query,
            qkv if norms is None else norms.key,
            0.0 if norms is None else norms.eps,
            cache.keys.stride(0),
            cache.keys.stride(1),
            NUM_Q=num_heads,
            NUM_K=num_kv_heads,
            SIZE=size,
            HAS_NORMS=norms is not None,
            BLOCK=triton.next_power_of_2(size // 2),
            num_warps=1,
        )
        return q

    def attend_rows(self, q: torch.Tensor, cache: SlotCache, cells: Cells, scale: float) -> torch.Tensor:
        """See ``Operations.attend_rows``."""
        num_rows, num_heads, size = q.shape
        num_kv_heads = cache.keys.shape[1]
        group = num_heads // num_kv_heads
        wanted = triton.cdiv(_PROGRAMS_WANTED, num_rows * num_kv_heads)
        num_slices = min(_MAX_SLICES, triton.next_power_of_2(wanted))
        parts = q.new_empty((num_rows, num_heads, num_slices, size), dtype=torch.float32)
        masses = parts.new_empty((num_rows, num_heads, num_slices))
        _attend_slices[(num_rows, num_kv_heads, num_slices)](
            q,
            cache.keys,
            cache.values,
            cells.slots,
            cells.positions,
            parts,
            masses,
            scale * _LOG2_E,
            cache.keys.stride(0),
            cache.keys.stride(1),
            NUM_Q=num_heads,
            GROUP=group,
            SIZE=size,
            NUM_SLICES=num_slices,
            BLOCK_G=max(_MIN_DOT, triton.next_power_of_2(group)),
            BLOCK_D=max(_MIN_DOT, triton.next_power_of_2(size)),
            BLOCK_L=64 if q.element_size() == 2 else 32,  # noqa: PLR2004
            PRECISION="tf32" if q.element_size() == 2 else "ieee",  # noqa: PLR2004
            num_warps=4,
            num_stages=3,
        )
        out = torch.empty_like(q)
        _join_slices[(num_rows * num_heads,)](
            parts,
            masses,
            out,
            SIZE=size,
            NUM_SLICES=num_slices,
            BLOCK_D=max(_MIN_DOT, triton.next_power_of_2(size)),
            num_warps=1,
        )
        return out.view(num_rows, -1)

    def attend_spans(self, q: torch.Tensor, cache: SlotCache, layout: SpanLayout, scale: float) -> torch.Tensor:
        """See ``Operations.attend_spans``."""
        num_heads, size = q.shape[1:]
        is_half = q.element_size() == 2  # noqa: PLR2004
        out = torch.empty_like(q)
        _attend_tiles[(len(layout.tiles), num_heads)](
            q,
            cache.keys,
            cache.values,
            layout.tiles,
            out,
            scale * _LOG2_E,
            cache.keys.stride(0),
            cache.keys.stride(1),
            NUM_Q=num_heads,
            GROUP=num_heads // cache.keys.shape[1],
            SIZE=size,
            BLOCK_M=self.tile_size,
            BLOCK_D=max(_MIN_DOT, triton.next_power_of_2(size)),
            BLOCK_L=64 if is_half else 32,
            PRECISION="tf32" if is_half else "ieee",
            num_warps=4,
            num_stages=3 if is_half else 1,
        )
        return out.flatten(1)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ``Operations.gate``."""
        size = gate_up.shape[1] // 2
        out = gate_up.new_empty((len(gate_up), size))
        block = 1024
        _gate[(len(gate_up), triton.cdiv(size, block))](gate_up, out, SIZE=size, BLOCK=block, num_warps=4)
        return out
