"""Forward and backward passes of one update, on one process or a gang, with the same inputs and outputs.

Every rank gets all passes, computes its share of them, and receives the results of the others. A rank with fewer passes
than the others computes one token that nothing depends on, since a pass over sharded weights needs all ranks.
``trainer.py`` decides what the passes are for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from attrs import asdict, field, frozen
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from areal_actors.domain import Floats
from areal_actors.errors import CaptureViolation, CustomFunctionError
from areal_actors.lib.transfers import to_device
from areal_actors.models import model_shape
from areal_actors.training.batch import Batch
from areal_actors.training.config import Activations
from areal_actors.training.forward import TokenScores, score_pack
from areal_actors.training.gang import Gang
from areal_actors.training.layers import layer_memory
from areal_actors.training.objective import MAXIMA, Objective, ObjectiveLoss, TokenSums
from areal_actors.training.packing import Pack
from areal_actors.training.sharding import free_gathered
from areal_actors.training.surrogates import LossInputs

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
        self.count_kept: Callable[[int], int] = lambda _: 0
        """How many layers keep their activations by ``auto`` in the next pass, of so many tokens."""
        self.is_compiled = False

    def forward(self, pack: Pack) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the fields of ``TokenScores`` as a tuple, in which gradient hooks find the tensors."""
        kind = self.model.device.type
        # The format to which layers cast their weights; the ranks of a gang gather them in it already.
        is_cast = torch.is_autocast_enabled(kind) and not isinstance(self, FSDPModule)
        # The ranks of a gang may differ: a layer gathers its weights when it is called and when its backward pass
        # begins, and recomputes with them in between.
        is_counted = self.activations is Activations.AUTO and torch.is_grad_enabled()
        layers = layer_memory(
            self.model,
            activations=self.activations,
            num_kept=self.count_kept(pack.input_ids.size) if is_counted else 0,
            dtype=torch.get_autocast_dtype(kind) if is_cast else None,
            is_compiled=self.is_compiled,
        )
        with layers:
            found = score_pack(self.model, pack)
        assert found.is_outside is not None
        return found.logprobs, found.entropies, found.raw_logprobs, found.is_outside


@frozen(kw_only=True)
class Accumulated:
    """The results of the passes of an update, with their ``scores`` as ``Passes.score`` returns them.

    ``num_outside`` tokens are outside what truncation keeps.
    """

    loss: float
    sums: TokenSums
    scores: tuple[Floats, ...] = field(eq=False)
    num_outside: int


@frozen(kw_only=True)
class Passes:
    """Computes packs in ``dtype``. All ranks of ``gang`` make the same calls with the same packs."""

    gang: Gang
    dtype: torch.dtype
    progress: Counter[str] = field(factory=Counter, eq=False)
    """Counts the passes that have begun, for a watch on another thread."""

    def accumulate(self, scorer: Scorer, objective: Objective, batch: Batch, packs: Sequence[Pack]) -> Accumulated:
        """Add the gradients of all ``packs`` to those of the weights.

        Raises ``CaptureViolation`` for ids that the model does not have, before anything is computed.
        """
        _check_ids(scorer.model, packs)
        found = [np.zeros((2, len(pack.targets)), dtype=np.float32) for pack in packs]
        total, sums, num_outside = 0.0, TokenSums(), 0.0
        for index in self.gang.rounds(packs):
            pack = _DUMMY_PACK if index is None else packs[index]
            scores = self._score(scorer, pack)
            result = None if index is None else _apply(objective, scores, batch, pack)
            # The backward pass of sharded weights is collective, too: without it the other ranks would wait.
            torch.autograd.backward(0.0 * scores.logprobs.sum() if result is None else result.loss)
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
    def score(self, scorer: Scorer, packs: Sequence[Pack]) -> tuple[Floats, ...]:
        """Return for each pack the log-probabilities of its n trained tokens, float32 [2, n].

        The first row belongs to the distributions that the tokens were sampled from, the second to the plain softmax.

        Raises ``CaptureViolation`` as ``accumulate`` does.
        """
        _check_ids(scorer.model, packs)
        found = [np.zeros((2, len(pack.targets)), dtype=np.float32) for pack in packs]
        for index in self.gang.rounds(packs):
            scores = self._score(scorer, _DUMMY_PACK if index is None else packs[index])
            if index is not None:
                found[index] = _pair(scores)
        # Without a backward pass, nothing else frees the weights that this one gathered.
        free_gathered(scorer)
        return self._share_scores(found)

    def _score(self, scorer: Scorer, pack: Pack) -> TokenScores:
        self.progress["passes"] += 1
        with self.precision(scorer.model.device.type):
            logprobs, entropies, raw, is_outside = scorer(pack)
        return TokenScores(logprobs=logprobs, entropies=entropies, raw_logprobs=raw, is_outside=is_outside)

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

    def _share_scores(self, found: Sequence[Floats]) -> tuple[Floats, ...]:
        """Return the scores [2, n] of all passes, of which each rank has computed some."""
        if self.gang.is_alone or not found:
            return tuple(found)
        # Each rank has zeros in place of what others computed, so the sum is exact.
        whole = self.gang.sum(np.concatenate(found, axis=1).astype(np.float64).reshape(-1)).astype(np.float32)
        bounds = np.cumsum([values.shape[1] for values in found])[:-1]
        return tuple(np.split(whole.reshape(2, -1), bounds, axis=1))


def _pair(scores: TokenScores) -> Floats:
    """Return log-probabilities and plain ones, float32 [2, n]."""
    pair: Floats = torch.stack([scores.logprobs.detach(), scores.raw_logprobs]).cpu().numpy()
    return pair


def _apply(objective: Objective, scores: TokenScores, batch: Batch, pack: Pack) -> ObjectiveLoss:
    tokens, device = batch.tokens_of(pack.rows), scores.logprobs.device
    counts = [int(batch.offsets[row + 1] - batch.offsets[row]) for row in pack.rows]

    def pick(values: Floats) -> Tensor:
        return to_device(values[tokens], device)

    def pick_optional(name: Literal["proximal", "reference", "teacher"]) -> Tensor | None:
        values = batch.optional(name)
        return None if values is None else pick(values)

    proximal = pick_optional("proximal")
    inputs = LossInputs(
        advantages=pick(batch.advantages),
        weights=pick(batch.weights),
        behaviour=pick(batch.behaviour),
        proximal=scores.logprobs.detach() if proximal is None else proximal,
        reference=pick_optional("reference"),
        teacher=pick_optional("teacher"),
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
