"""``Operations`` in plain torch, for any device: what the Triton kernels are tested against.

It reads whole slots under a mask where a kernel reads each sequence's own length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from areal_actors.generation.torch.graphs import GraphRunner
from areal_actors.generation.torch.operations import Cells, HeadNorms, SlotCache, SpanLayout


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


def create_graph_runner(forward: Any, config: Any, *, context_length: int) -> GraphRunner:
    """Return the runner of accelerators on any device, with these operations."""
    return GraphRunner(forward, config, context_length=context_length, operations=TorchOperations())
