"""Compute the steps of models that run by their own modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import torch

from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.generation.torch.rows import CachedModel, Rows, join_rows
from areal_actors.generation.torch.scheduler import Admission, Generation, Prefill
from areal_actors.generation.torch.worker import Step, finish_step


class RowRunner:
    """Computes steps of a ``CachedModel``.

    A slot holds its prompt, or all of a generation that has ended, as a row of its own; rows that decode are joined to
    batches, copied from their slots. A batch remains while the same generations decode.
    """

    is_ahead = False

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

    def launch(self, decoding: Sequence[Generation], ready: Sequence[Generation], prefills: Sequence[Prefill]) -> Step:
        """Compute a step: see ``Runner.launch``."""
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
        logits = torch.cat(parts) if parts else torch.empty(0)
        return finish_step(logits, [*decoding, *done], ready, num_done=len(done))

    def _join(self, group: Sequence[Generation], places: Mapping[Generation, tuple[Rows, int]]) -> Rows:
        """Return a batch of these generations; ``places`` are those of the ones that have decoded before."""
        found = [places.get(each) or (self._slots[each.slot.index], 0) for each in group if each.slot is not None]
        return join_rows([(rows, [i for _, i in part]) for rows, part in groupby(found, key=itemgetter(0))])
