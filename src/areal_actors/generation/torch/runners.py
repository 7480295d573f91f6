"""Compute the steps of an engine: ``SlotRunner`` for the lean path, and ``RowRunner`` for all other models."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Protocol

import numpy as np
import torch

from areal_actors.generation.torch.attention import (
    DecodeLayout,
    KeyValues,
    SharingPlan,
    Span,
    StepAttention,
    plan_alone,
    plan_sharing,
)
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.generation.torch.forward import FlatBatch, Forward, LlamaForward
from areal_actors.generation.torch.rows import CachedModel, Rows, join_rows
from areal_actors.generation.torch.scheduler import Admission, Generation, Prefill


class Runner(Protocol):
    """Computes steps. Only the engine's thread calls it."""

    @property
    def can_cut(self) -> bool:
        """Return whether a slot can be continued from any prefix of its tokens."""
        ...

    def admit(self, admission: Admission) -> None:
        """Copy the cached prefix into the generation's slot."""
        ...

    def release(self, generation: Generation) -> int:
        """Keep what was computed of a generation that has ended, and return of how many tokens the slot has it."""
        ...

    def forget(self, generation: Generation) -> None:
        """Discard what was computed of a generation. With new weights, all that run are computed again."""
        ...

    def compute(
        self, decoding: Sequence[Generation], prefills: Sequence[Prefill]
    ) -> tuple[Sequence[Generation], torch.Tensor]:
        """Compute the last token of each ``decoding`` generation, and ``prefills``.

        Return logits float32 [B, V], and the generations whose next tokens they yield: all that decode, in an order
        that the runner chooses, then those whose prompts are complete.
        """
        ...


class CreateRunner(Protocol):
    """Creates the runner of an engine, on the engine's thread."""

    def __call__(self, forward: Forward, config: TorchEngineConfig) -> Runner:
        """Return a runner of ``forward``."""
        ...


def create_runner(forward: Forward, config: TorchEngineConfig) -> Runner:
    """Return the runner of a forward that ``create_forward`` chose."""
    return SlotRunner(forward, config) if isinstance(forward, LlamaForward) else RowRunner(forward, config)


class SlotRunner:
    """Computes steps of the lean path, on a CPU."""

    can_cut = True

    def __init__(self, forward: LlamaForward, config: TorchEngineConfig) -> None:
        self._forward = forward
        self._config = config
        # A multiple of any vector width, so that no row is in a kernel's remainder loop, which may round differently.
        self._num_fixed_rows = -(-config.max_concurrent // 64) * 64
        self._kv = KeyValues()
        self._free_tails = list(range(config.max_concurrent))
        self._planned: tuple[Generation, ...] = ()
        self._plan = SharingPlan((), ())

    def admit(self, admission: Admission) -> None:
        """Copy the cached prefix into the generation's slot."""
        source, slot = admission.source, admission.slot
        self._kv.reserve(slots=slot.index + 1, columns=admission.generation.base)
        if source is not None and source is not slot and admission.num_cached:
            self._kv.copy_prefix(source.index, slot.index, admission.num_cached)

    def release(self, generation: Generation) -> int:
        """Append the sampled tokens to the slot, free the tail row, and return how many tokens the slot now holds.

        The last sampled token is not among them, because its keys and values were never computed.
        """
        slot = generation.slot
        if slot is None:
            return 0
        if generation.tail_row < 0:
            return min(slot.ready, generation.length)
        num_tail = generation.length - 1 - generation.base
        self._kv.append_tail(generation.tail_row, slot.index, at=generation.base, length=num_tail)
        self.forget(generation)
        return generation.base + num_tail

    def forget(self, generation: Generation) -> None:
        """Free the tail row without keeping its contents."""
        if generation.tail_row >= 0:
            heapq.heappush(self._free_tails, generation.tail_row)
            generation.tail_row = -1
            self._planned = ()

    def compute(
        self, decoding: Sequence[Generation], prefills: Sequence[Prefill]
    ) -> tuple[Sequence[Generation], torch.Tensor]:
        """Compute a step: see ``Runner.compute``."""
        # The sharing plan is computed again only when rows were added or removed.
        if decoding and tuple(decoding) != self._planned:
            self._planned = tuple(decoding)
            mains = [g.tokens[: g.base] for g in decoding]
            self._plan = plan_alone(mains) if self._config.deterministic else plan_sharing(mains)
        order = [self._planned[i] for i in self._plan.order] if decoding else []
        groups = [(order, prefills)]
        if self._config.deterministic:
            # Separate batches: a row must not depend on the prompts in its batch.
            groups = [(order, ()), ([], prefills)]
        parts = [self._compute(rows, spans) for rows, spans in groups if rows or spans]
        logits = torch.cat(parts) if len(parts) > 1 else parts[0]
        return [*order, *(p.generation for p in prefills if p.is_last)], logits

    def _compute(self, rows: Sequence[Generation], prefills: Sequence[Prefill]) -> torch.Tensor:
        layout = self._lay_out(rows) if rows else None
        num_rows = layout.num_rows if layout else 0
        ids = np.zeros(num_rows + sum(p.stop - p.start for p in prefills), dtype=np.int64)
        positions = np.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place], positions[place] = row.tokens[row.length - 1], row.length - 1
        wanted, spans, offset = list(range(num_rows)), [], num_rows
        for prefill in prefills:
            end = offset + prefill.stop - prefill.start
            ids[offset:end] = prefill.generation.tokens[prefill.start : prefill.stop]
            positions[offset:end] = np.arange(prefill.start, prefill.stop)
            assert prefill.generation.slot is not None
            spans.append(Span(prefill.generation.slot.index, prefill.start, prefill.stop, offset))
            if prefill.is_last:
                wanted.append(end - 1)
            offset = end
        batch = FlatBatch(torch.from_numpy(ids), torch.from_numpy(positions), torch.tensor(wanted, dtype=torch.int64))
        logits = self._forward.run(batch, StepAttention(self._kv, layout, spans))
        # Rows are padded only if there are no spans.
        return logits if num_rows == len(rows) else logits[: len(rows)]

    def _lay_out(self, rows: Sequence[Generation]) -> DecodeLayout:
        for row in rows:
            if row.tail_row < 0:
                row.tail_row = heapq.heappop(self._free_tails)
        tails = np.array([row.tail_row for row in rows])
        columns = np.array([row.length - 1 - row.base for row in rows])
        self._kv.reserve_tail(rows=int(tails.max()) + 1, columns=int(columns.max()) + 1)
        return DecodeLayout(
            plan=self._plan,
            slots=tuple(row.slot.index for row in rows if row.slot is not None),
            tails=torch.from_numpy(tails),
            num_tails=int(tails.max()) + 1,
            bases=torch.tensor([row.base for row in rows]),
            num_rows=self._num_fixed_rows if self._config.deterministic else len(rows),
            is_alone=self._config.deterministic,
            columns=torch.from_numpy(columns),
        )


class RowRunner:
    """Computes steps of a ``CachedModel``.

    A slot holds its prompt, or all of a generation that has ended, as a row of its own; rows that decode are joined to
    batches, copied from their slots. A batch remains while the same generations decode.
    """

    def __init__(self, model: CachedModel, config: TorchEngineConfig) -> None:
        self._model = model
        self._is_alone = config.deterministic or not model.can_pad
        self._slots: dict[int, Rows] = {}
        self._batches: dict[tuple[Generation, ...], Rows] = {}
        if config.return_routed_experts:
            model.record_experts()

    @property
    def can_cut(self) -> bool:
        """Return whether a slot can be continued from any prefix of its tokens."""
        return self._model.can_cut

    def admit(self, admission: Admission) -> None:
        """Copy the cached prefix into the generation's slot."""
        source, index, length = admission.source, admission.slot.index, admission.num_cached
        if source is None or not length:
            self._slots[index] = self._model.create_rows()
        elif source.index != index or self._slots[index].lengths != (length,):
            self._slots[index] = self._slots[source.index].take(0, length)

    def release(self, generation: Generation) -> int:
        """Move the row of a generation into its slot, and return how many tokens the slot now holds.

        The last sampled token is not among them, because it was never computed.
        """
        slot = generation.slot
        if slot is None:
            return 0
        for members, rows in list(self._batches.items()):
            if generation in members:
                place = members.index(generation)
                self._slots[slot.index] = rows.take(place, rows.lengths[place])
                if all(each is generation or each.slot is None for each in members):
                    del self._batches[members]
        return self._slots[slot.index].lengths[0]

    def forget(self, generation: Generation) -> None:
        """Discard the batch of a generation that is computed again, as all others of the batch are."""
        self._batches = {members: rows for members, rows in self._batches.items() if generation not in members}

    def compute(
        self, decoding: Sequence[Generation], prefills: Sequence[Prefill]
    ) -> tuple[Sequence[Generation], torch.Tensor]:
        """Compute a step: see ``Runner.compute``."""
        groups = [(each,) for each in decoding] if self._is_alone else [tuple(decoding)] * bool(decoding)
        places = {each: (rows, i) for members, rows in self._batches.items() for i, each in enumerate(members)}
        batches = {group: self._batches.get(group) or self._join(group, places) for group in groups}
        self._batches = {}
        parts = []
        for group, rows in batches.items():
            ids = torch.tensor([[each.tokens[each.length - 1]] for each in group], device=self._model.device)
            logits, self._batches[group] = self._model.extend(rows, ids)
            parts.append(logits[:, 0])
            if (experts := self._model.take_experts()) is not None:
                for place, each in enumerate(group):
                    each.experts.write(each.length - 1, experts[place : place + 1])
        for prefill in prefills:
            generation, slot = prefill.generation, prefill.generation.slot
            assert slot is not None
            ids = torch.from_numpy(generation.tokens[None, prefill.start : prefill.stop]).long().to(self._model.device)
            logits, self._slots[slot.index] = self._model.extend(self._slots[slot.index], ids)
            if prefill.is_last:
                parts.append(logits[:, 0])
            if (experts := self._model.take_experts()) is not None:
                generation.experts.write(prefill.start, experts)
        done = [prefill.generation for prefill in prefills if prefill.is_last]
        return [*decoding, *done], torch.cat(parts) if parts else torch.empty((0, 0))

    def _join(self, group: Sequence[Generation], places: Mapping[Generation, tuple[Rows, int]]) -> Rows:
        """Return a batch of these generations; ``places`` are those of the ones that have decoded before."""
        found = [places.get(each) or (self._slots[each.slot.index], 0) for each in group if each.slot is not None]
        return join_rows([(rows, [i for _, i in part]) for rows, part in groupby(found, key=itemgetter(0))])
