"""The operations of a decoder over slots that deserve kernels of their own, which ``kernels.py`` implements in Triton.

Shapes: N tokens, B rows of one token each, Hq query heads, Hk key heads of size D, slots of L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from attrs import define, frozen

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
