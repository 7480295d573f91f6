"""Attention over packed rows without computing, or storing, what a mask would forbid.

Half of the attention of a padded causal row is masked, and far more of a trie's: eight answers to one prompt do not
attend to each other. There is one implementation for each kind of device:

* ``SEGMENT_ATTENTION`` (CPU): each segment attends, in a separate call of sdpa, to its ancestors and itself. All keys
  are gathered by one index and all queries split once, because the backward pass of many small slices would spend its
  time on filling and adding zeros.
* ``BLOCK_ATTENTION`` (GPU): FlexAttention over blocks of 128 by 128. A pass of L tokens needs two int32 [L] and four
  int32 [L/128, L/128]; no tensor is L by L.

transformers finds both by name. A ``PackMask`` takes the place of the mask: transformers passes a ``BlockMask`` that it
did not make to all layers unchanged, through activation checkpointing, too. Layers with a sliding window name it in
their call, and get the plan of that window; distances are those in the row, not those in the pack. Models that do not
work like this (``model_checks.py`` tries) keep their attention, and compute padded rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from areal_actors.lib.transfers import to_device
from areal_actors.models import model_shape
from areal_actors.training.packing import Segment, node_depths, subtree_ends

SEGMENT_ATTENTION = "areal_segments"
"""Name of the attention by segments, which is fastest on a CPU."""
BLOCK_ATTENTION = "areal_blocks"
"""Name of the attention by blocks, which compiles for a GPU."""

_BLOCK = 128
_MAX_COMPILED = 64
_MIN_HEAD_DIM = 16
"""FlexAttention multiplies blocks on tensor cores, which take no smaller dimension."""


_NUMBERED = ("", SEGMENT_ATTENTION, BLOCK_ATTENTION)


def planned_attention(model: Any) -> str | None:
    """Return the name of the attention that computes packs on the model's device; ``None`` if it keeps its own.

    The attention that transformers chooses is replaced: sdpa, or eager where sdpa lacks sinks or bounds of scores. Any
    other was chosen on purpose.
    """
    # transformers has no public names for these
    usual = "sdpa" if model._supports_sdpa else "eager"  # noqa: SLF001
    if model.config._attn_implementation != usual or not model._can_set_attn_implementation():  # noqa: SLF001
        return None
    if model.device.type == "cpu":
        return SEGMENT_ATTENTION
    return BLOCK_ATTENTION if model_shape(model.config).head_dim >= _MIN_HEAD_DIM else None


def has_planned_attention(model: Any) -> bool:
    """Whether ``model`` computes packs by plan."""
    return model.config._attn_implementation in (SEGMENT_ATTENTION, BLOCK_ATTENTION)  # noqa: SLF001


def attention_number(model: Any) -> int:
    """Return a number for the attention by plan of ``model``, 0 if it has another; see ``set_attention_number``."""
    name = model.config._attn_implementation  # noqa: SLF001
    return _NUMBERED.index(name) if name in _NUMBERED else 0


def set_attention_number(model: Any, number: int) -> None:
    """Give ``model`` the attention by plan whose ``attention_number`` is that on another rank; 0 changes nothing."""
    if number > 0:
        model.set_attn_implementation(_NUMBERED[number])


@frozen(kw_only=True)
class Scores:
    """How a layer computes its scores. A token sees the last ``window`` tokens of its row, itself included.

    ``scaling`` multiplies scores, and ``cap`` c makes c * tanh(score / c) of them. ``sinks`` [H] are the scores of a
    key of each head that every token sees, and that has no value.
    """

    window: int | None
    scaling: float | None
    cap: float | None
    sinks: Tensor | None = field(eq=False)

    @property
    def is_plain(self) -> bool:
        """Whether sdpa computes these scores."""
        return self.cap is None and self.sinks is None

    def bound(self, scores: Tensor) -> Tensor:
        """Return scaled scores within the bound."""
        return scores if self.cap is None else self.cap * (scores / self.cap).tanh()

    def share(self, normalisers: Tensor) -> Tensor:
        """Return the share of attention [..., H, Q, 1] that sinks leave to the keys of these ``normalisers``."""
        if self.sinks is None:
            return normalisers.new_ones(1)
        # softmax over the keys and the sink: exp(n) / (exp(n) + exp(s)) of the softmax over the keys alone
        return (normalisers - self.sinks.float()[:, None]).sigmoid()[..., None]


class PackMask(BlockMask):
    """The plans of attention over ``segments``, in the place of a mask [1, 1, L, L] that is never made.

    Each plan is made when a layer first needs it. ``windows`` lists the window of every layer that has attended.
    """

    ndim = 4  # which GPT-2 looks at

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        # The fields of a BlockMask stay unset: layers get the block masks that ``by_block`` returns.
        self.segments = segments
        self.device = device
        self.length = segments[-1].stop
        self.windows: list[int | None] = []
        self._segment_plans: dict[int | None, SegmentPlan] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the mask that this stands for; transformers looks at its length."""
        return (1, 1, self.length, self.length)

    def __repr__(self) -> str:
        """Return the number of segments and of tokens; a ``BlockMask`` would draw its blocks."""
        return f"PackMask({len(self.segments)} segments, {self.length} tokens)"

    def by_segment(self, window: int | None) -> SegmentPlan:
        """Return the plan for attention by segments."""
        # Layers with the same window share a plan.
        if window not in self._segment_plans:
            self._segment_plans[window] = SegmentPlan.create(self.segments, window=window)
        return self._segment_plans[window]

    def by_block(self, window: int | None) -> BlockMask:
        """Return the mask for attention by blocks, of ``padded_length(L)`` positions."""
        if window in self._block_masks:
            return self._block_masks[window]
        padding = padded_length(self.length) - self.length
        # A padding position sees itself only: a query that sees nothing would be nan.
        own_ends = np.arange(self.length, self.length + padding, dtype=np.int32) + 1
        ends_L = np.concatenate([subtree_ends(self.segments), own_ends])
        depths_L = np.pad(node_depths(self.segments), (0, padding))
        masked, full = plan_blocks(ends_L, depths_L, window=window)
        rule = _tree_rule(to_device(ends_L, self.device))
        if window is not None:
            # The bound is a tensor because a number would be compiled in, once for each window.
            rule = _within_window(rule, to_device(depths_L, self.device), to_device(depths_L - window, self.device))
        counts, blocks, full_counts, full_blocks = (
            to_device(found, self.device)[None, None] for found in (*_block_list(masked), *_block_list(full))
        )
        # On the device: it also transposes the lists, which took 16 ms for 256 blocks on 16 cores of the host.
        self._block_masks[window] = BlockMask.from_kv_blocks(
            counts,
            blocks,
            full_counts,
            full_blocks,
            BLOCK_SIZE=_BLOCK,
            mask_mod=rule,
            seq_lengths=(len(ends_L), len(ends_L)),
        )
        return self._block_masks[window]


# --------------------------------------------------------------------------------------------------- by segments


@frozen(kw_only=True)
class SegmentPlan:
    """Attention segment by segment: ``keys`` int64 [K] of all segments, concatenated, and each one's sizes and mask.

    ``keys`` is ``None`` if no segment has ancestors, so that they are all positions in their order. ``masks`` are
    additive float32 [queries, keys], or ``None`` for plain causal attention.
    """

    keys: Tensor | None = field(eq=False)
    query_sizes: tuple[int, ...]
    key_sizes: tuple[int, ...]
    masks: tuple[Tensor | None, ...] = field(eq=False)

    @classmethod
    def create(cls, segments: Sequence[Segment], *, window: int | None = None) -> SegmentPlan:
        """Return the plan for ``segments``, of which a token sees the last ``window`` ancestors, itself included."""
        # Ancestors ascend in depth: those that not even the first token sees are at the front.
        seen = [
            segment.ancestors[0 if window is None else max(0, len(segment.ancestors) - window + 1) :]
            for segment in segments
        ]
        keys = [
            np.concatenate([ancestors, np.arange(segment.start, segment.stop)])
            for segment, ancestors in zip(segments, seen, strict=True)
        ]
        sizes = [segment.stop - segment.start for segment in segments]
        return cls(
            keys=torch.from_numpy(np.concatenate(keys)) if any(map(len, seen)) else None,
            query_sizes=tuple(sizes),
            key_sizes=tuple(len(found) for found in keys),
            masks=tuple(
                _segment_mask(size, len(found), window=window) for size, found in zip(sizes, keys, strict=True)
            ),
        )


def _segment_mask(num_queries: int, num_keys: int, *, window: int | None) -> Tensor | None:
    # Plain causal attention, which sdpa computes without a mask.
    if num_queries == num_keys and (window is None or num_keys <= window):
        return None
    hidden = torch.full((num_queries, num_keys), torch.finfo(torch.float32).min)
    first = num_keys - num_queries
    mask = hidden.triu(first + 1)
    return mask if window is None else mask.add_(hidden.tril_(first - window))


def _attend_by_segment(mask: PackMask, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    plan = mask.by_segment(scores.window)
    if plan.keys is not None:
        key, value = key.index_select(2, plan.keys), value.index_select(2, plan.keys)
    outputs = [
        _attend_alone(query_part, key_part, value_part, part, scores)
        for query_part, key_part, value_part, part in zip(
            query.split_with_sizes(plan.query_sizes, 2),
            key.split_with_sizes(plan.key_sizes, 2),
            value.split_with_sizes(plan.key_sizes, 2),
            plan.masks,
            strict=True,
        )
    ]
    return torch.cat(outputs, 2)


def _attend_alone(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Attend densely with an additive or boolean ``mask`` [..., queries, keys]; ``None`` is plain causal attention."""
    if scores.is_plain:
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scores.scaling, enable_gqa=True
        )
    num_heads, scaling = query.shape[1], scores.scaling or query.shape[-1] ** -0.5
    key, value = (part.repeat_interleave(num_heads // part.shape[1], 1) for part in (key, value))
    scores_HQK = scores.bound((query @ key.mT).float() * scaling)
    if mask is None:
        mask = torch.ones(scores_HQK.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask.dtype is torch.bool:
        scores_HQK = scores_HQK.masked_fill(~mask, torch.finfo(torch.float32).min)
    else:
        scores_HQK = scores_HQK + mask
    normalisers = scores_HQK.logsumexp(-1)
    return ((scores_HQK - normalisers[..., None]).exp() * scores.share(normalisers)).to(value.dtype) @ value


# ----------------------------------------------------------------------------------------------------- by blocks


def padded_length(length: int) -> int:
    """Return the number of positions that a pass of ``length`` tokens has for attention by blocks.

    A multiple of the block, so that all passes run through one compiled kernel; at least two blocks, because compilers
    treat a dimension of one as a constant.
    """
    return max(2, -(-length // _BLOCK)) * _BLOCK


def plan_blocks(
    ends: npt.NDArray[np.int32], depths: npt.NDArray[np.int32], *, window: int | None = None, size: int = _BLOCK
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return the key blocks that each of M query blocks computes, bool [M, M]: with the mask, and whole without it.

    ``ends`` and ``depths`` are those of ``subtree_ends`` and ``node_depths``, of a length that ``size`` divides.
    Nothing in here is larger than the square of the number of blocks.
    """
    num_blocks = len(ends) // size
    ends_MB, depths_MB = ends.reshape(num_blocks, size), depths.reshape(num_blocks, size)
    starts = np.arange(num_blocks)[:, None] * size
    before = np.tri(num_blocks, k=-1, dtype=bool)
    # The subtree of some key reaches the block's first query; those of all keys reach its last query.
    visible = before & (ends_MB.max(1) > starts)
    full = before & (ends_MB.min(1) >= starts + size)
    if window is not None:
        # Bounds from the extremes of both blocks: a block may be listed in vain, and is never left out.
        visible &= depths_MB.min(1)[:, None] - depths_MB.max(1) < window
        full &= depths_MB.max(1)[:, None] - depths_MB.min(1) < window
    return (visible & ~full) | np.eye(num_blocks, dtype=bool), full & visible


def _block_list(chosen: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    return chosen.sum(1).astype(np.int32), np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)


Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query attends to a key, from the indices of batch, head, query and key."""


def _tree_rule(ends: Tensor) -> Rule:
    def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    return is_visible


def _within_window(rule: Rule, depths: Tensor, bounds: Tensor) -> Rule:
    def is_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return rule(batch, head, query, key) & (depths[key] > bounds[query])

    return is_near


def _attend_by_block(mask: PackMask, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    kind = query.device.type
    output: Tensor
    with torch.autocast(kind, enabled=False):
        output, found = _compiled_attention(kind)(
            query,
            key,
            value,
            # A tensor, as the bounds of windows: numbers are compiled in, or fail to compile where several occur.
            score_mod=None if scores.cap is None else _bounded_score(torch.tensor(scores.cap, device=query.device)),
            block_mask=mask.by_block(scores.window),
            scale=scores.scaling,
            enable_gqa=True,
            kernel_options=_KERNEL_OPTIONS,
            return_aux=AuxRequest(lse=scores.sinks is not None),
        )
    if scores.sinks is not None:
        output = (output * scores.share(found.lse)).to(output.dtype)
    return output


def _bounded_score(cap: Tensor) -> Callable[..., Tensor]:
    def bounded(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return cap * (score / cap).tanh()

    return bounded


@cache
def _compiled_attention(kind: str) -> Callable[..., tuple[Tensor, Any]]:
    """Return FlexAttention, compiled once for each process.

    On a CPU it is traced as on a GPU and then computes all scores: torch has no CPU kernel with a backward pass.
    ``dynamic`` because every pack has another length. ``fullgraph`` because torch would otherwise, after too many
    recompilations, silently compute all L by L scores. Shapes of heads, windows and the absence of gradients
    compile once each, which for a policy, a reference and a teacher may be more than the 8 that torch allows.
    """
    dynamo_config: Any = torch._dynamo.config  # noqa: SLF001 - torch documents this setting under this name
    dynamo_config.cache_size_limit = max(dynamo_config.cache_size_limit, _MAX_COMPILED)
    backend = "aot_eager" if kind == "cpu" else "inductor"
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)


# All lengths are padded to whole blocks. Kernels that do not know it check the bounds of each load: for 32k tokens in
# trees of 8k (12 heads of 128, H100), the forward pass takes 1.30 instead of 1.19 ms and the backward pass 4.6 instead
# of 3.5 ms. They do not see it in the lengths, nor in torch._check of them.
_KERNEL_OPTIONS: Any = {"IS_DIVISIBLE": True}


# ---------------------------------------------------------------------------------------------- for transformers


_Attend = Callable[[PackMask, Tensor, Tensor, Tensor, Scores], Tensor]
"""Attention by plan of query, key and value."""


def _for_transformers(attend: _Attend) -> Callable[..., Any]:
    def forward(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend: ``query`` [1, H, L, D], ``key``, ``value`` [1, K, L, D]; return [1, L, H, D]."""
        scores = Scores(
            window=kwargs.get("sliding_window"),
            scaling=kwargs.get("scaling"),
            cap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
        )
        is_planned = isinstance(attention_mask, PackMask)
        if not is_planned and scores.is_plain:
            output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
            return output, None
        for name in ("dropout", "position_bias"):
            found = kwargs.get(name)
            if found is not None and (isinstance(found, Tensor) or found):
                raise NotImplementedError(f"Attention by plan does not support {name}.")
        # Rotary embeddings leave queries and keys in float32 under autocast, which would cast them for sdpa, but does
        # not for FlexAttention.
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if is_planned:
            attention_mask.windows.append(scores.window)
            output = attend(attention_mask, query, key, value, scores)
        else:
            output = _attend_alone(query, key, value, attention_mask, scores)
        return output.transpose(1, 2).contiguous(), None

    return forward


AttentionInterface.register(SEGMENT_ATTENTION, _for_transformers(_attend_by_segment))
AttentionInterface.register(BLOCK_ATTENTION, _for_transformers(_attend_by_block))
# Passes without a plan, as those of the checks, get the masks of sdpa.
AttentionMaskInterface.register(SEGMENT_ATTENTION, sdpa_mask)
AttentionMaskInterface.register(BLOCK_ATTENTION, sdpa_mask)
