"""The operations of a decoder over slots that deserve kernels of their own, and their implementation in plain torch.

``kernels.py`` implements the same in Triton. This one runs on every device and is what the kernels are tested against:
it reads whole slots under a mask where a kernel reads each sequence's own length. Shapes: N tokens, B rows of one token
each, Hq query heads, Hk key heads of size D, slots of L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from attrs import define, frozen
from torch.nn.functional import scaled_dot_product_attention, silu

from areal_actors.generation.torch.attention import Span


@define(eq=False)
class SlotCache:
    """Keys and values of one layer, both [slots, Hk, L, D]."""

    keys: torch.Tensor
    values: torch.Tensor


@frozen(eq=False)
class Cells:
    """The places of tokens in the cache: ``slots`` and ``positions``, int64 [N]."""

    slots: torch.Tensor
    positions: torch.Tensor


@frozen(eq=False)
class HeadNorms:
    """Weights [D] of the norms of query and key heads."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@frozen(eq=False)
class SpanLayout:
    """Spans of prompts that are computed in one batch.

    ``tiles`` int32 [T, 4] cuts them into tiles of at most ``Operations.tile_size`` tokens: slot, position and batch
    column of the first token, and the number of tokens.
    """

    spans: Sequence[Span]
    tiles: torch.Tensor


class Operations(Protocol):
    """The computations of a decoder layer apart from its matrix products."""

    tile_size: int

    def normalize(
        self, residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add ``update`` [N, H] to ``residual`` float32 [N, H] in place, and return its RMS norm in weight's dtype."""
        ...

    def rotate(
        self,
        qkv: torch.Tensor,
        cache: SlotCache,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cells: Cells,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        """Store keys and values of ``qkv`` [N, (Hq + 2 Hk) D] in the cache, and return the queries [N, Hq, D].

        Query and key heads are normalised if there are ``norms``, and rotated: ``rotation`` holds cosines and sines,
        float32 [L, D / 2].
        """
        ...

    def attend_rows(self, q: torch.Tensor, cache: SlotCache, cells: Cells, scale: float) -> torch.Tensor:
        """Return the attention [B, Hq D] of ``q`` [B, Hq, D] to each row's slot, up to its position and with it."""
        ...

    def attend_spans(self, q: torch.Tensor, cache: SlotCache, layout: SpanLayout, scale: float) -> torch.Tensor:
        """Return the causal attention [N, Hq D] of ``q`` [N, Hq, D] to the slots of the spans."""
        ...

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up [N, I] of ``gate_up`` [N, 2 I]."""
        ...


class TorchOperations:
    """Plain torch."""

    tile_size = 64

    def normalize(
        self, residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See ``Operations.normalize``."""
        if update is not None:
            residual += update
        scale = torch.rsqrt(residual.square().mean(-1, keepdim=True) + eps)
        return (residual * scale * weight).to(weight.dtype)

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
        heads = qkv.view(len(qkv), -1, size)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q, k, v = torch.split(heads.float(), [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            q, k = (
                x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norms.eps) * weight
                for x, weight in ((q, norms.query), (k, norms.key))
            )
        cos, sin = (table[cells.positions][:, None] for table in rotation)
        q, k = (
            torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1) for a, b in (q.chunk(2, dim=-1), k.chunk(2, -1))
        )
        cache.keys[cells.slots, :, cells.positions] = k.to(qkv.dtype)
        cache.values[cells.slots, :, cells.positions] = v.to(qkv.dtype)
        return q.to(qkv.dtype)

    def attend_rows(self, q: torch.Tensor, cache: SlotCache, cells: Cells, scale: float) -> torch.Tensor:
        """See ``Operations.attend_rows``."""
        keys, values = cache.keys[cells.slots], cache.values[cells.slots]
        mask = torch.arange(keys.shape[2], device=q.device) <= cells.positions[:, None]
        out = scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=mask[:, None, None], scale=scale, enable_gqa=True
        )
        return out.reshape(len(q), -1)

    def attend_spans(self, q: torch.Tensor, cache: SlotCache, layout: SpanLayout, scale: float) -> torch.Tensor:
        """See ``Operations.attend_spans``."""
        out = torch.empty_like(q)
        for span in layout.spans:
            at = slice(span.offset, span.offset + span.stop - span.start)
            keys, values = cache.keys[span.slot, :, : span.stop], cache.values[span.slot, :, : span.stop]
            places = torch.arange(span.stop, device=q.device)
            out[at] = scaled_dot_product_attention(
                q[at].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=places <= places[span.start :, None],
                scale=scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out.flatten(1)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ``Operations.gate``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up
