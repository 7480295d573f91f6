"""Attention over a packed trie, segment by segment, without computing what a mask would forbid.

Half of the attention of a padded causal row is masked, and far more of a trie's: eight answers to one prompt do not
attend to each other. So each segment attends, in a separate call, to its ancestors and itself. All keys are gathered by
one index and all queries split once, because the backward pass of many small slices would spend its time on filling and
adding zeros.

transformers finds this implementation by name. The plan is attached to the mask that is passed as usual; an
architecture that creates its own mask loses the plan and gets the ordinary attention over that mask, which is slower
and equally exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from areal_actors.training.packing import Segment, visible

__all__ = ["TREE_ATTENTION", "AttentionPlan", "tree_mask", "use_tree_attention"]

TREE_ATTENTION = "areal_tree"
"""Name under which this attention is registered with transformers."""


@frozen(kw_only=True)
class AttentionPlan:
    """A plan of attention: ``keys`` int64 [K] of all segments, concatenated, and the sizes and masks of each segment.

    ``masks`` are additive float32 [queries, keys], or ``None`` for plain causal attention.
    """

    keys: Tensor = field(eq=False)
    query_sizes: tuple[int, ...]
    key_sizes: tuple[int, ...]
    masks: tuple[Tensor | None, ...] = field(eq=False)

    @classmethod
    def create(cls, segments: Sequence[Segment]) -> AttentionPlan:
        """Return the plan for ``segments``."""
        keys = [np.concatenate([segment.ancestors, np.arange(segment.start, segment.stop)]) for segment in segments]
        return cls(
            keys=torch.from_numpy(np.concatenate(keys)),
            query_sizes=tuple(segment.stop - segment.start for segment in segments),
            key_sizes=tuple(len(found) for found in keys),
            masks=tuple(_segment_mask(segment) for segment in segments),
        )


def use_tree_attention(model: Any) -> None:
    """Make ``model`` attend by plan if that is faster: on CPU, if its attention is sdpa. Otherwise nothing changes."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":  # noqa: SLF001
        model.set_attn_implementation(TREE_ATTENTION)


def tree_mask(segments: Sequence[Segment], device: torch.device) -> Tensor:
    """Return an additive float32 mask [1, 1, L, L] for ``segments``, which carries the plan on the CPU."""
    seen = torch.from_numpy(visible(segments)).to(device)
    mask = torch.zeros(seen.shape, device=device).masked_fill_(~seen, torch.finfo(torch.float32).min)[None, None]
    if device.type == "cpu":
        mask.tree_plan = AttentionPlan.create(segments)  # type: ignore[attr-defined]
    return mask


def _tree_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls it: ``query`` [1, H, L, D], ``key``, ``value`` [1, K, L, D]; return [1, L, H, D]."""
    plan: AttentionPlan | None = getattr(attention_mask, "tree_plan", None)
    if plan is None or kwargs.get("dropout") or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    keys = key.index_select(2, plan.keys).split_with_sizes(plan.key_sizes, 2)
    values = value.index_select(2, plan.keys).split_with_sizes(plan.key_sizes, 2)
    outputs = [
        scaled_dot_product_attention(
            query_part, key_part, value_part, mask, is_causal=mask is None, scale=kwargs.get("scaling"), enable_gqa=True
        )
        for query_part, key_part, value_part, mask in zip(
            query.split_with_sizes(plan.query_sizes, 2), keys, values, plan.masks, strict=True
        )
    ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _segment_mask(segment: Segment) -> Tensor | None:
    if not len(segment.ancestors):
        return None
    length = segment.stop - segment.start
    own = torch.full((length, length), torch.finfo(torch.float32).min).triu_(1)
    return torch.cat([torch.zeros(length, len(segment.ancestors)), own], dim=1)


AttentionInterface.register(TREE_ATTENTION, _tree_attention_forward)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
