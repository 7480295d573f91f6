"""Forward and backward passes of one update, on one process or a gang, with the same inputs and outputs.

Every rank gets all passes, computes its share of them, and receives the results of the others. A rank with fewer passes
than the others computes one token that nothing depends on, since a pass over sharded weights needs all ranks.
``trainer.py`` decides what the passes are for.

Passes in chunks have the gradients of a pass of any length, and the activations of a part of it. A pass of L tokens is
cut into chunks of consecutive positions. As a trie lists its nodes depth first, the ancestors of a token are in its own
chunk or in earlier ones, of which only keys and values matter::

    forward, without gradients     chunk 0 ──▶ chunk 1 ──▶ chunk 2        keys and values of those that others attend to
    loss of the whole pass         scores of all chunks ──▶ gradients of all scores
    forward and backward           chunk 2 ──▶ chunk 1 ──▶ chunk 0        gradients of keys and values, added up

In the second forward pass each chunk attends to the stored keys and values of its ancestors' chunks. Its backward pass
starts from the gradients of its own scores and from those that later chunks left for its keys and values. So the loss
may combine tokens of all chunks, and the gradient is that of the whole pass, up to the order of sums. The price is one
more forward pass.

Measured with 10M parameters on one core, for 4096 tokens in chunks of 512: 149 instead of 851 MiB are saved for the
backward pass, plus 80 MiB of keys, values and gradients, at 1.35 times the CPU time; gradients differ by 3e-7. Context
parallelism was the alternative: it needs several devices for a row, and knows no tree masks.

Memory: the activations of one chunk; keys and values of the chunks that later ones attend to, and their gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import asdict, evolve, field, frozen
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from areal_actors.domain import Floats
from areal_actors.errors import CaptureViolation, CustomFunctionError
from areal_actors.lib.transfers import to_device
from areal_actors.models import model_shape
from areal_actors.training.batch import Batch, Indices
from areal_actors.training.config import Activations
from areal_actors.training.distributions import Distributions
from areal_actors.training.forward import TokenScores, score_pack
from areal_actors.training.gang import Gang
from areal_actors.training.layers import has_compiled, layer_memory
from areal_actors.training.memory import count_kept_layers
from areal_actors.training.objective import MAXIMA, Objective, ObjectiveLoss, TokenSums
from areal_actors.training.packing import Pack, Segment
from areal_actors.training.sharding import free_gathered
from areal_actors.training.surrogates import LossInputs
from areal_actors.training.tree_attention import Layers, PackMask, chunk_length

_MAX_NAMED = 2
_NOTHING = np.zeros(0, dtype=np.int64)
_DUMMY_PACK = Pack(
    input_ids=np.zeros((1, 1), dtype=np.int64),
    position_ids=np.zeros((1, 1), dtype=np.int64),
    segments=None,
    rows=(),
    sources=_NOTHING,
    targets=_NOTHING,
    num_tokens=0,
)
"""A pass that trains nothing, for ranks that take part in the collective calls only."""


class Scorer(torch.nn.Module):
    """A model as the trainer calls it. The ranks gather its weights when this module is called."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.activations = Activations.KEEP
        self.is_compiled = False

    def forward(self, pack: Pack, mask: PackMask | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the fields of ``TokenScores`` as a tuple, in which gradient hooks find the tensors."""
        kind = self.model.device.type
        # The format to which layers cast their weights; the ranks of a gang gather them in it already.
        is_sharded, is_cast = isinstance(self, FSDPModule), torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if is_cast else None
        activations, num_kept = self.activations, 0
        if activations is Activations.AUTO:
            activations = Activations.RECOMPUTE
            if torch.is_grad_enabled():
                # The ranks of a gang may differ: a layer gathers its weights when it is called and when its backward
                # pass begins, and recomputes with them in between.
                num_kept = count_kept_layers(
                    self.model,
                    dtype=dtype or torch.float32,
                    num_tokens=pack.input_ids.size,
                    is_sharded=is_sharded,
                    # Until a class has run compiled, it may turn out not to compile, and keep more.
                    is_compiled=self.is_compiled and has_compiled(self.model),
                )
        layers = layer_memory(
            self.model,
            activations=activations,
            num_kept=num_kept,
            dtype=None if is_sharded else dtype,
            is_compiled=self.is_compiled,
        )
        with layers:
            found = score_pack(self.model, pack, mask=mask)
        assert found.is_outside is not None
        return found.logprobs, found.entropies, found.raw_logprobs, found.is_outside


# ------------------------------------------------------------------------------------------------------ chunks


@frozen(kw_only=True)
class Chunk:
    """A part of a pass: ``pack`` holds its own tokens, and segments behind those of the chunks in ``prefix``.

    Positions in the segments count the tokens of the chunks ``prefix``, in their order, and then the chunk's own.
    ``trained`` int64 [m] are the indices of its trained tokens among those of the pass.
    """

    pack: Pack
    prefix: tuple[int, ...]
    trained: Indices = field(eq=False)


def split_pack(pack: Pack, size: int) -> tuple[Chunk, ...]:
    """Return the chunks of ``size`` tokens of ``pack``; the last one may be shorter. Padded rows are one chunk."""
    if pack.segments is None or pack.input_ids.shape[1] <= size:
        return (Chunk(pack=pack, prefix=(), trained=np.arange(len(pack.targets))),)
    chunks: list[Chunk] = []
    for start in range(0, pack.input_ids.shape[1], size):
        stop = min(start + size, pack.input_ids.shape[1])
        own = [
            (max(segment.start, start), min(segment.stop, stop), segment)
            for segment in pack.segments
            if segment.start < stop and start < segment.stop
        ]
        above = [np.concatenate([segment.ancestors, np.arange(segment.start, first)]) for first, _, segment in own]
        # Ancestors in this chunk itself are not a prefix: they come with the chunk's own keys.
        prefix = np.unique(
            np.concatenate([np.zeros(0, dtype=np.int64), *(nodes[nodes < start] // size for nodes in above)])
        )
        # Where each chunk begins in the order of the prefix, followed by this one.
        offsets = np.zeros(start // size + 1, dtype=np.int64)
        offsets[prefix] = np.arange(len(prefix)) * size
        offsets[-1] = len(prefix) * size
        shift = int(offsets[-1]) - start
        trained = np.flatnonzero((start <= pack.sources) & (pack.sources < stop))
        chunks.append(
            Chunk(
                pack=evolve(
                    pack,
                    input_ids=pack.input_ids[:, start:stop],
                    position_ids=pack.position_ids[:, start:stop],
                    segments=tuple(
                        Segment(start=first + shift, stop=last + shift, ancestors=offsets[nodes // size] + nodes % size)
                        for (first, last, _), nodes in zip(own, above, strict=True)
                    ),
                    rows=(),
                    sources=pack.sources[trained] - start,
                    targets=pack.targets[trained],
                    num_tokens=stop - start,
                    distributions=pack.distributions and Distributions(settings=pack.distributions.settings[trained]),
                    routed_experts=None if pack.routed_experts is None else pack.routed_experts[start:stop],
                ),
                prefix=tuple(prefix.tolist()),
                trained=trained,
            )
        )
    return tuple(chunks)


class ChunkStore:
    """Keys and values of the ``chunks`` of a pass that others attend to, and their gradients."""

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.chunks = chunks
        self._device = device
        self._needed = {index for chunk in chunks for index in chunk.prefix}
        self._kept: dict[int, Layers] = {}
        self._gradients: dict[int, Layers] = {}

    def mask(self, index: int) -> PackMask | None:
        """Return the mask of the chunk, whose prefix are leaves that receive gradients; ``None`` for a whole pass."""
        chunk = self.chunks[index]
        if len(self.chunks) == 1:
            return None
        prefix = [
            {layer: (_leaf(key), _leaf(value)) for layer, (key, value) in self._kept[earlier].items()}
            for earlier in chunk.prefix
        ]
        is_needed = index in self._needed
        return PackMask(chunk.pack.segments or (), self._device, prefix=prefix, keeps_own=is_needed)

    def keep(self, index: int, mask: PackMask | None) -> None:
        """Store the keys and values that the chunk computed, if later chunks attend to them."""
        if mask is not None and mask.keeps_own:
            self._kept[index] = {layer: (key.detach(), value.detach()) for layer, (key, value) in mask.own.items()}

    def backward(
        self, index: int, mask: PackMask | None, outputs: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Run the backward pass of the chunk from its ``outputs`` and from what later chunks left for it."""
        if mask is None:
            torch.autograd.backward(outputs, gradients)
            return
        roots, given = list(outputs), list(gradients)
        for layer, found in self._gradients.pop(index, {}).items():
            for tensor, gradient in zip(mask.own[layer], found, strict=True):
                if tensor.requires_grad:  # not below the first trained weight
                    roots.append(tensor)
                    given.append(gradient)
        torch.autograd.backward(roots, given)
        for earlier, layers in zip(self.chunks[index].prefix, mask.prefix, strict=True):
            # In the format of the leaves, as a residual's gradients are.
            total = self._gradients.setdefault(earlier, {})
            for layer, (key, value) in layers.items():
                if key.grad is None or value.grad is None:
                    continue
                if layer in total:
                    total[layer][0].add_(key.grad)
                    total[layer][1].add_(value.grad)
                else:
                    total[layer] = (key.grad, value.grad)
        self._kept.pop(index, None)


def _leaf(tensor: Tensor) -> Tensor:
    # Without a gradient there is no backward pass that would fill it.
    return tensor.detach().requires_grad_(torch.is_grad_enabled())


# ------------------------------------------------------------------------------------------------------ passes


@frozen(kw_only=True)
class PassScores:
    """Log-probabilities that a pass computed for its n trained tokens, float32 [n].

    ``logprobs`` belong to the distributions that the tokens were sampled from, ``raw_logprobs`` to the plain softmax.
    """

    logprobs: Floats = field(eq=False)
    raw_logprobs: Floats = field(eq=False)


@frozen(kw_only=True)
class Accumulated:
    """The results of the passes of an update; ``num_outside`` tokens are outside what truncation keeps."""

    loss: float
    sums: TokenSums
    scores: tuple[PassScores, ...]
    num_outside: int


@frozen(kw_only=True)
class Passes:
    """Computes packs in ``dtype``. All ranks of ``gang`` make the same calls with the same packs.

    Passes of more than ``chunk_tokens`` tokens are computed in chunks of so many; ``None`` means that none is.
    """

    gang: Gang
    dtype: torch.dtype
    chunk_tokens: int | None = None
    progress: Counter[str] = field(factory=Counter, eq=False)
    """Counts the passes that have begun, for a watch on another thread."""

    def accumulate(self, scorer: Scorer, objective: Objective, batch: Batch, packs: Sequence[Pack]) -> Accumulated:
        """Add the gradients of all ``packs`` to those of the weights.

        Raises ``CaptureViolation`` for ids that the model does not have, before anything is computed.
        """
        _check_ids(scorer.model, packs)
        found = [np.zeros((2, len(pack.targets)), dtype=np.float32) for pack in packs]
        total, sums, num_outside = 0.0, TokenSums(), 0.0
        for index, num_calls in self._rounds(scorer, packs):
            pack = _DUMMY_PACK if index is None else packs[index]
            chunks = None if num_calls == 1 else self._split(scorer, pack)
            scores = self._score(scorer, pack) if chunks is None else self._score_chunks(scorer, chunks, num_calls)
            result = None if index is None else _apply(objective, scores, batch, pack)
            # The backward pass of sharded weights is collective, too: without it the other ranks would wait.
            torch.autograd.backward(0.0 * scores.logprobs.sum() if result is None else result.loss)
            if chunks is not None:
                self._backward_chunks(scorer, chunks, num_calls, scores)
            if index is None or result is None:
                continue
            total, sums = total + float(result.loss.detach()), sums + result.sums
            num_outside += 0.0 if scores.is_outside is None else float(scores.is_outside.sum())
            found[index] = _pair(scores)
        if not self.gang.is_alone:
            # The sums of all ranks, in two reductions: by maximum and by sum.
            values = asdict(sums)
            maxima = self.gang.max(np.array([values.pop(name) for name in MAXIMA]))
            totals = dict(zip(values, self.gang.sum(np.array(list(values.values()), dtype=np.float64)), strict=True))
            num_tokens = int(totals.pop("num_tokens"))
            rest = {name: float(value) for name, value in (totals | dict(zip(MAXIMA, maxima, strict=True))).items()}
            sums = TokenSums(num_tokens=num_tokens, **rest)
        return Accumulated(
            loss=self._sum(total),
            sums=sums,
            scores=self._share_scores(found),
            num_outside=int(self._sum(num_outside)),
        )

    @torch.no_grad()
    def score(self, scorer: Scorer, packs: Sequence[Pack]) -> tuple[PassScores, ...]:
        """Return the scores of the trained tokens of each pack.

        Raises ``CaptureViolation`` as ``accumulate`` does.
        """
        _check_ids(scorer.model, packs)
        found = [np.zeros((2, len(pack.targets)), dtype=np.float32) for pack in packs]
        for index, num_calls in self._rounds(scorer, packs):
            pack = _DUMMY_PACK if index is None else packs[index]
            if num_calls == 1:
                scores = self._score(scorer, pack)
            else:
                scores = self._score_chunks(scorer, self._split(scorer, pack), num_calls)
            if index is not None:
                found[index] = _pair(scores)
        # Without a backward pass, nothing else frees the weights that this one gathered.
        free_gathered(scorer)
        return self._share_scores(found)

    def _score(self, scorer: Scorer, pack: Pack, mask: PackMask | None = None) -> TokenScores:
        self.progress["passes"] += 1
        with self.precision(scorer.model.device.type):
            logprobs, entropies, raw, is_outside = scorer(pack, mask)
        return TokenScores(logprobs=logprobs, entropies=entropies, raw_logprobs=raw, is_outside=is_outside)

    # ------------------------------------------------------------------------------------------------- in chunks

    def _rounds(self, scorer: Scorer, packs: Sequence[Pack]) -> list[tuple[int | None, int]]:
        """Return the index of this rank's pack in each round, and how often all ranks call the scorer in it.

        All of them call it as often as the one whose pack has the most chunks.
        """
        return [
            (own, max(len(self._split(scorer, packs[index]).chunks) for index in dealt))
            for own, dealt in self.gang.rounds(packs)
        ]

    def _split(self, scorer: Scorer, pack: Pack) -> ChunkStore:
        size = pack.input_ids.size if self.chunk_tokens is None else chunk_length(scorer.model, self.chunk_tokens)
        return ChunkStore(split_pack(pack, size), scorer.model.device)

    def _score_chunks(self, scorer: Scorer, store: ChunkStore, num_calls: int) -> TokenScores:
        """Return the scores of the whole pass as leaves, which receive the gradients of its loss."""
        parts = []
        with torch.no_grad():
            for index in range(num_calls):
                if index >= len(store.chunks):
                    # Another rank has more chunks, and gathers the weights for them from this one, too.
                    self._score(scorer, _DUMMY_PACK)
                    continue
                mask = store.mask(index)
                parts.append(self._score(scorer, store.chunks[index].pack, mask))
                store.keep(index, mask)
        order = to_device(np.argsort(np.concatenate([chunk.trained for chunk in store.chunks])), scorer.model.device)
        logprobs, entropies, raw, is_outside = (
            torch.cat([getattr(part, name) for part in parts])[order]
            for name in ("logprobs", "entropies", "raw_logprobs", "is_outside")
        )
        for leaf in (logprobs, entropies):
            leaf.requires_grad_(torch.is_grad_enabled())
        return TokenScores(logprobs=logprobs, entropies=entropies, raw_logprobs=raw, is_outside=is_outside)

    def _backward_chunks(self, scorer: Scorer, store: ChunkStore, num_calls: int, scores: TokenScores) -> None:
        """Add the gradients of the pass, from those of its ``scores``."""
        given = [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (scores.logprobs, scores.entropies)
        ]
        for index in reversed(range(num_calls)):
            if index >= len(store.chunks):
                torch.autograd.backward(0.0 * self._score(scorer, _DUMMY_PACK).logprobs.sum())
                continue
            mask = store.mask(index)
            part = self._score(scorer, store.chunks[index].pack, mask)
            trained = to_device(store.chunks[index].trained, scorer.model.device)
            store.backward(index, mask, (part.logprobs, part.entropies), [values[trained] for values in given])

    def precision(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context in which a pass computes in ``dtype``."""
        if self.dtype is torch.float32:
            return nullcontext()
        # Without autocast's cache: a pass uses each weight once, and the cache would hold a bfloat16 copy of all of
        # them until its end.
        return torch.autocast(device_type, dtype=self.dtype, cache_enabled=False)

    # ------------------------------------------------------------------------------------------ what all ranks know

    def _sum(self, value: float) -> float:
        return float(self.gang.sum(np.array([value]))[0])

    def _share_scores(self, found: Sequence[npt.NDArray[np.float32]]) -> tuple[PassScores, ...]:
        """Return the scores [2, n] of all passes, of which each rank has computed some."""
        parts = [values.reshape(-1) for values in found]
        if parts and not self.gang.is_alone:
            # Each rank has zeros in place of what others computed, so the sum is exact.
            whole = np.concatenate(parts).astype(np.float64)
            bounds = np.cumsum([len(part) for part in parts])[:-1]
            parts = np.split(self.gang.sum(whole).astype(np.float32), bounds)
        halves = (np.split(values, 2) for values in parts)
        return tuple(PassScores(logprobs=logprobs, raw_logprobs=raw) for logprobs, raw in halves)


def _pair(scores: TokenScores) -> npt.NDArray[np.float32]:
    """Return log-probabilities and plain ones, float32 [2, n]."""
    pair: npt.NDArray[np.float32] = torch.stack([scores.logprobs.detach(), scores.raw_logprobs]).cpu().numpy()
    return pair


def _apply(objective: Objective, scores: TokenScores, batch: Batch, pack: Pack) -> ObjectiveLoss:
    tokens, device = batch.tokens_of(pack.rows), scores.logprobs.device
    counts = [int(batch.offsets[row + 1] - batch.offsets[row]) for row in pack.rows]

    def pick(values: Floats) -> Tensor:
        return to_device(values[tokens], device)

    inputs = LossInputs(
        advantages=pick(batch.advantages),
        weights=pick(batch.weights),
        behaviour=pick(batch.behaviour),
        proximal=scores.logprobs.detach() if batch.proximal is None else pick(batch.proximal),
        reference=None if batch.reference is None else pick(batch.reference),
        teacher=None if batch.teacher is None else pick(batch.teacher),
        plain=pick(batch.plain),
        is_plain=to_device(batch.is_plain[tokens], device),
        rows=to_device(np.repeat(np.arange(len(counts)), counts), device),
        num_rows=len(counts),
    )
    try:
        return objective(scores, inputs)
    except CustomFunctionError as error:
        sessions = sorted({batch.rows[row].trajectory.session for row in pack.rows})
        num_more = len(sessions) - _MAX_NAMED
        more = f" and {num_more} more" if num_more > 0 else ""
        named = ", ".join(sessions[:_MAX_NAMED]) + more
        raise CustomFunctionError(f"{error} Its tokens were of session {named}.") from error


def _check_ids(model: Any, packs: Sequence[Pack]) -> None:
    vocab_size = model_shape(model.config).vocab_size
    for pack in packs:
        if pack.input_ids.max() >= vocab_size or pack.input_ids.min() < 0:
            raise CaptureViolation(
                f"A row has the token id {pack.input_ids.max()}, beyond the model's {vocab_size} ids: engine and "
                "trainer do not hold the same model."
            )
