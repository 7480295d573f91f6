"""Models of every family, run by their own modules, masks and caches of transformers.

``CachedModel`` continues rows of tokens. Rows of different lengths share a pass: they end in the same column of the
cache, and a mask hides the columns before a row begins::

    row 0, 3 tokens    . . . . c a t
    row 1, 7 tokens    a l l g o o d

Keys and values of windowed layers are kept for the whole row, and the mask of the model hides what is outside the
window, so that a prefix of a row can be continued as well. A recurrent state (linear attention, Mamba, convolutions)
holds the whole row: such rows can only be continued where they end.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch.nn.functional import pad

from areal_actors.domain import Experts
from areal_actors.errors import ModelError
from areal_actors.lib.routers import find_routers

_CACHE_NAMES = ("past_key_values", "cache_params")
"""How models name the argument, and the output, that is their cache."""
_GROWING = frozenset({"keys", "values", "indexer_keys"})
"""Tensors of a cache that have a column for each token: [rows, ..., columns, D]. Others have rows only."""
_CUTTABLE = frozenset({"DynamicLayer", "DynamicIndexedLayer", "DummyLayer"})
"""Layers of a cache that can be continued from any prefix."""


@frozen(eq=False)
class Rows:
    """Rows of tokens that ``cache`` holds; ``lengths`` are their numbers of tokens. All end in the last column."""

    cache: Any
    lengths: tuple[int, ...]

    def take(self, index: int, length: int) -> Rows:
        """Return a copy of the first ``length`` tokens of a row. A shorter one than the row needs ``can_cut``."""
        taken = join_rows([(self, [index])])
        if length == taken.lengths[0]:
            return taken
        taken.cache.crop(length - taken.lengths[0])
        return Rows(taken.cache, (length,))


def join_rows(parts: Sequence[tuple[Rows, Sequence[int]]]) -> Rows:
    """Return a copy of some rows of each part in one cache."""
    lengths = [[rows.lengths[i] for i in places] for rows, places in parts]
    longest = max(map(max, lengths))
    cache = _join(
        "",
        [rows.cache for rows, _ in parts],
        [list(places) for _, places in parts],
        [longest - max(rows.lengths) for rows, _ in parts],
    )
    return Rows(cache, tuple(chain(*lengths)))


def _join(name: str, values: Sequence[Any], places: Sequence[list[int]], shifts: Sequence[int]) -> Any:
    """Join the parts of caches that belong to rows, wherever in the caches they are.

    ``shifts`` are the columns by which the rows of each part move to the right; negative ones drop padding.
    """
    first = values[0]
    if isinstance(first, torch.Tensor) and first.ndim:
        moves = shifts if name in _GROWING else [0] * len(shifts)
        picked = [value[..., max(0, -by) :, :] if by else value for value, by in zip(values, moves, strict=True)]
        # Indexing by a list copies the rows.
        picked = [value[rows] for value, rows in zip(picked, places, strict=True)]
        picked = [pad(value, (0, 0, by, 0)) if by > 0 else value for value, by in zip(picked, moves, strict=True)]
        return picked[0] if len(picked) == 1 else torch.cat(picked)
    if isinstance(first, dict):
        return {key: _join(name, [value[key] for value in values], places, shifts) for key in first}
    if isinstance(first, list):
        return [_join(name, each, places, shifts) for each in zip(*values, strict=True)]
    if not type(first).__module__.startswith("transformers."):
        return first
    joined = copy.copy(first)
    for key in vars(first):
        vars(joined)[key] = _join(key, [vars(value)[key] for value in values], places, shifts)
    return joined


class CachedModel:
    """A transformers causal LM, with its modules and weights unchanged.

    ``can_chunk``: several tokens continue a row in one pass; otherwise they take one pass each. ``can_cut``: a prefix
    of a row can be continued. ``can_pad``: rows of different lengths share a pass. ``lacking`` names those of them that
    the model was found not to compute right.

    Raises ``ModelError`` if the model keeps no cache of the tokens that it has read.
    """

    def __init__(self, model: Any, lacking: Collection[str] = ()) -> None:
        names = inspect.signature(model.forward).parameters
        self._model = model
        self._cache_name = next((name for name in _CACHE_NAMES if name in names), "")
        self._options = {"position_ids", "logits_to_keep", "attention_mask"} & {*names}
        self._experts: list[torch.Tensor] = []
        self.parameters: Mapping[str, torch.Tensor] = dict(model.named_parameters())
        saved = model.state_dict()
        self.buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        self.aliases: Mapping[str, str] = {name: target for name, target in tied.items() if name not in self.parameters}
        self.device: torch.device = next(iter(self.parameters.values())).device
        # A trainer may have put attention into the model that needs its own masks.
        if getattr(model.config, "_attn_implementation", None) not in {None, "eager", "sdpa"}:
            model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")
        self._makes_own_cache = self._find_own_cache()
        layers = [] if self._makes_own_cache else self.create_rows().cache.layers
        is_cuttable = bool(layers) and {type(layer).__name__ for layer in layers} <= _CUTTABLE
        self.can_chunk = "can_chunk" not in lacking
        self.can_cut = is_cuttable and "can_cut" not in lacking
        self.can_pad = "can_pad" not in lacking
        # States of rows have no columns that a mask could hide.
        self._has_columns = self._makes_own_cache or any(hasattr(layer, "keys") for layer in layers)

    def _find_own_cache(self) -> bool:
        """Return whether the model only works with a class of cache that it makes itself."""
        from transformers import DynamicCache

        made = None
        if self._cache_name:
            one = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
            made = getattr(self._model(input_ids=one, use_cache=True), self._cache_name, None)
        if made is None:
            raise ModelError(
                f"{type(self._model).__name__} keeps no cache of the tokens that it has read, so the embedded engine "
                "cannot sample from it; serve it with an inference server."
            )
        return type(made) is not DynamicCache

    def create_rows(self) -> Rows:
        """Return a row without tokens."""
        from transformers import DynamicCache, cache_utils

        if self._makes_own_cache:
            return Rows(None, (0,))
        cache = DynamicCache(config=self._model.config)
        for index, layer in enumerate(cache.layers):
            # Without its window, which the masks of the model apply.
            if type(layer) is cache_utils.DynamicSlidingWindowLayer:
                cache.layers[index] = cache_utils.DynamicLayer()
            elif type(layer) is cache_utils.LinearAttentionAndSlidingWindowAttentionLayer:
                cache.layers[index] = cache_utils.LinearAttentionAndFullAttentionLayer(layer.number_of_states)
        return Rows(cache, (0,))

    def extend(self, rows: Rows, ids: torch.Tensor, *, num_logits: int = 1) -> tuple[torch.Tensor, Rows]:
        """Append ``ids`` int64 [B, T] to the rows, whose cache is overwritten.

        Return the logits float32 [B, num_logits, V] that follow the last tokens, and the longer rows.
        """
        num_new = ids.shape[1]
        if num_new > 1 and any(rows.lengths) and not self.can_chunk:
            parts = []
            for column in range(num_new):
                logits, rows = self.extend(rows, ids[:, column : column + 1])
                parts.append(logits)
            return torch.cat(parts[-num_logits:], dim=1), rows
        starts, longest = torch.tensor(rows.lengths, device=self.device)[:, None], max(rows.lengths)
        columns = torch.arange(longest + num_new, device=self.device)
        options = {
            "position_ids": starts + columns[:num_new],
            "logits_to_keep": num_logits,
            "attention_mask": (columns >= longest - starts).long(),
        }
        if min(rows.lengths) == longest or not self._has_columns:
            del options["attention_mask"]
        options = {name: value for name, value in options.items() if name in self._options}
        out = self._model(input_ids=ids, use_cache=True, **{self._cache_name: rows.cache}, **options)
        logits = torch.as_tensor(out.logits)[:, -num_logits:].float()
        return logits, Rows(getattr(out, self._cache_name), tuple(length + num_new for length in rows.lengths))

    def record_experts(self) -> None:
        """Record from now on which experts the routers of the model choose, if it has any."""
        for router in find_routers(self._model):
            router.register_forward_hook(lambda _router, _args, output: self._experts.append(output[2]))

    def take_experts(self) -> Experts | None:
        """Return the experts of the tokens of the passes since the last call, [N, layers, k]; ``None`` if not recorded.

        Tokens are in the order of rows, then of columns.
        """
        if not self._experts:
            return None
        routers = find_routers(self._model)
        # A pass calls each router once, and there may have been a pass for each token.
        passes = [
            torch.stack(self._experts[i : i + len(routers)], 1) for i in range(0, len(self._experts), len(routers))
        ]
        self._experts = []
        # The largest value of a type means that an expert is unknown.
        is_small = all(len(router.weight) <= np.iinfo(np.uint8).max for router in routers)
        return torch.cat(passes).cpu().numpy().astype(np.uint8 if is_small else np.uint16)
