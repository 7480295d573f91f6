"""Schedule generations: slots for keys and values, the prefix cache in them, and the work of each step. No tensors.

A slot belongs to one running generation, or is free and keeps its contents as a prefix cache. A new generation uses the
longest prefix that any slot holds: in place if it simply continues a free slot (the next turn of an episode), by copy
otherwise. If a running prefill is about to hold more of it, the generation waits for that: of a group of equal prompts,
only the first is computed. No generation waits indefinitely, because it only waits for a prefill, and each step
advances one.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from areal_actors.domain import EngineRequest, Experts, FinishReason, Ints, SampleKey, Sampling, TopLogprob
from areal_actors.generation.base import Decode, StopScanner, find_stop_ids
from areal_actors.generation.torch.attention import common_prefix
from areal_actors.generation.torch.sampler import has_penalties, is_neutral

if TYPE_CHECKING:
    import torch

    from areal_actors.generation.torch.constraint import Constraint


@define(eq=False)
class Tokens:
    """Sampled tokens that have not been delivered, with their log-probabilities and alternatives.

    ``num_cached`` tokens of the prompt came from the prefix cache, if this was not reported before.
    """

    ids: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    raw_logprobs: list[float] = field(factory=list)
    tops: list[tuple[TopLogprob, ...]] = field(factory=list)
    num_cached: int = 0

    def add(self, token_id: int, logprob: float, raw_logprob: float, top: tuple[TopLogprob, ...]) -> None:
        """Append a token."""
        self.ids.append(token_id)
        self.logprobs.append(logprob)
        self.raw_logprobs.append(raw_logprob)
        self.tops.append(top)


def create_uniforms(key: SampleKey) -> Callable[[], float]:
    """Return the stream of uniform numbers in [0, 1) for ``key``: the n-th call returns the number of the n-th token.

    The generator is counter-based, so that the stream depends only on the key, in every process and on every machine.
    """
    text = repr((int(key.seed), tuple(key.path))).encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
    generator = np.random.Generator(np.random.Philox(key=seed))
    generator.random(key.num_drawn)
    return generator.random


@define(eq=False)
class ExpertLog:
    """The experts of the first ``num_known`` of up to ``capacity`` tokens of a generation, computed in order.

    What was written first stays: tokens that are computed again with newer weights keep the experts with which their
    successors were sampled.
    """

    capacity: int
    num_known: int = 0
    _array: Experts | None = None

    def write(self, start: int, experts: Experts) -> None:
        """Record ``experts`` [n, layers, k] of the tokens from ``start`` on."""
        stop = start + len(experts)
        if stop <= self.num_known:
            return
        if self._array is None:
            self._array = np.zeros((self.capacity, *experts.shape[1:]), dtype=experts.dtype)
        self._array[self.num_known : stop] = experts[self.num_known - start :]
        self.num_known = stop

    def read(self, length: int) -> Experts | None:
        """Return the experts of the first ``length`` tokens; ``None`` unless all are known."""
        return None if self._array is None or self.num_known < length else self._array[:length]


@define(eq=False, kw_only=True)
class Generation:
    """The state of one generation.

    ``tokens`` int32 has room for prompt and output; the first ``length`` are known. The keys and values of ``base``
    tokens are in the slot's main part, or will be once prefill has reached them; those of tokens sampled later are in
    its tail row. ``ahead`` tokens have been sampled that the host has not seen. ``is_plain``: tokens are sampled
    from the plain softmax, and no alternatives are wanted. ``needs_output``: the distribution of the next token depends
    on the last one through more than the model.
    """

    request: EngineRequest
    tokens: Ints
    length: int
    limit: int
    stop_ids: frozenset[int]
    uniform: Callable[[], float]
    scanner: StopScanner | None
    constraint: Constraint | None = None
    is_plain: bool = False
    needs_output: bool = False
    slot: Slot | None = None
    tail_row: int = -1
    base: int = 0
    ahead: int = 0
    num_cached: int | None = None
    finish: FinishReason | None = None
    outbox: Tokens = field(factory=Tokens)
    experts: ExpertLog

    @classmethod
    def create(
        cls,
        request: EngineRequest,
        *,
        context_length: int,
        decode: Decode | None,
        constraint: Constraint | None = None,
    ) -> Generation:
        """Create a generation that has not begun. ``request`` has been validated, and its grammar is ``constraint``."""
        num_prompt = len(request.prompt)
        limit = min(num_prompt + request.sampling.max_new_tokens, context_length)
        tokens = np.empty(limit, dtype=np.int32)
        tokens[:num_prompt] = request.prompt
        stop, earlier = request.sampling.stop, request.prompt[num_prompt - request.key.num_drawn :]
        return cls(
            request=request,
            tokens=tokens,
            length=num_prompt,
            limit=limit,
            stop_ids=find_stop_ids(request),
            uniform=create_uniforms(request.key),
            scanner=StopScanner(stop, decode, earlier.tolist()) if stop and decode is not None else None,
            constraint=constraint,
            is_plain=constraint is None and is_neutral(request.sampling) and not request.sampling.top_logprobs,
            needs_output=constraint is not None or has_penalties(request.sampling),
            experts=ExpertLog(limit),
        )

    @property
    def sampling(self) -> Sampling:
        """Return the sampling parameters."""
        return self.request.sampling

    @property
    def num_prompt(self) -> int:
        """Return the number of tokens of the request's prompt."""
        return len(self.request.prompt)

    @property
    def context(self) -> Ints:
        """Return all known tokens: the prompt and the output."""
        return self.tokens[: self.length]

    @property
    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """Return the tokens that the grammar allows next, bool [V], or ``None`` without a grammar."""
        return None if self.constraint is None else self.constraint.allowed()

    @property
    def output(self) -> Ints:
        """Return the sampled tokens."""
        return self.tokens[self.num_prompt : self.length]

    def append(self, token_id: int) -> None:
        """Append a token, and set ``finish`` if it ends the generation."""
        self.tokens[self.length] = token_id
        self.length += 1
        if token_id in self.stop_ids or (self.scanner is not None and self.scanner.is_complete(token_id)):
            self.finish = FinishReason.STOP
            return
        is_full, constraint = self.length >= self.limit, self.constraint
        if constraint is not None:
            constraint.append(token_id)
        # Only a stop token can follow, but the request has none, or there is no room for it: the answer is whole.
        if constraint is not None and constraint.is_over and (is_full or not constraint.has_stop):
            self.finish = FinishReason.STOP
        elif is_full:
            self.finish = FinishReason.LENGTH


MIN_WAIT_GAIN = 16
"""Waiting for another prefill must save this many tokens; fewer are computed faster than waited for."""

_NO_TOKENS = np.empty(0, np.int32)


@define(eq=False)
class Slot:
    """A place for the keys and values of one sequence.

    ``tokens`` are those that it holds or will hold; the first ``ready`` are computed. ``logits`` (float32 [V], a
    tensor) follow the last of ``tokens`` where they are known, so that an equal prompt needs no computation at all.
    ``used`` orders free slots by age.
    """

    index: int
    tokens: Ints = field(default=_NO_TOKENS)
    ready: int = 0
    owner: Generation | None = None
    used: int = 0
    logits: torch.Tensor | None = None
    experts: ExpertLog | None = None


@frozen
class Admission:
    """A generation that takes ``slot``.

    Its first ``num_cached`` tokens come from ``source``, which may be the slot itself.
    """

    generation: Generation
    slot: Slot
    source: Slot | None
    num_cached: int


@frozen
class Prefill:
    """Compute tokens [``start``, ``stop``) of ``generation`` in its slot."""

    generation: Generation
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Return whether the next token can be sampled after it."""
        return self.stop == self.generation.base


class Scheduler:
    """The slots and queues. Only the engine's thread calls it.

    ``can_cut``: a slot can be continued from any prefix of its tokens, and not only from all of them.
    """

    def __init__(self, *, num_slots: int, prefill_chunk: int, deterministic: bool = False) -> None:
        self.slots = tuple(Slot(index) for index in range(num_slots))
        self.waiting: deque[Generation] = deque()
        self.prefilling: list[Generation] = []
        self.decoding: list[Generation] = []
        self.prefill_chunk = prefill_chunk
        self.can_cut = True
        self._deterministic = deterministic
        self._clock = 0

    @property
    def running(self) -> list[Generation]:
        """Return the generations that have a slot, longest running first."""
        return [*self.decoding, *self.prefilling]

    def add(self, generation: Generation) -> None:
        """Append a generation to the queue."""
        self.waiting.append(generation)

    def admit(self, *, may_start: Callable[[Generation], bool] = lambda _: True) -> list[Admission]:
        """Assign slots to waiting generations in order of arrival. Copies must be made in the order returned."""
        admissions = []
        for generation in list(self.waiting):
            if all(slot.owner is not None for slot in self.slots):
                break
            if not may_start(generation):
                continue
            source, num_cached, is_worth_waiting = self._find_prefix(generation)
            if is_worth_waiting:
                continue
            # The source itself if it is free and loses nothing, as in the next turn of an episode; else the free slot
            # that was used longest ago.
            slot = source
            if slot is None or slot.owner is not None or num_cached < slot.ready - 1:
                free = (each for each in self.slots if each.owner is None)
                slot = min(free, key=lambda each: (each.ready > 0, each is source, each.used))
            logits = source.logits if source is not None and num_cached == generation.length else None
            if source is not None:
                source.used = self._tick()
            # What is not computed again has the experts with which it was computed.
            if source is not None and source.experts is not None:
                cached = source.experts.read(num_cached)
                if cached is not None:
                    generation.experts.write(0, cached)
            slot.experts = generation.experts
            slot.owner, slot.used = generation, self._tick()
            self._fill(slot, generation.context.copy(), num_cached, logits)
            generation.slot, generation.base = slot, generation.length
            # Count once: generations are admitted again after the weights changed.
            if generation.num_cached is None:
                generation.num_cached = generation.outbox.num_cached = min(num_cached, generation.num_prompt)
            (self.decoding if logits is not None else self.prefilling).append(generation)
            self.waiting.remove(generation)
            admissions.append(Admission(generation, slot, source, num_cached))
        return admissions

    def _find_prefix(self, generation: Generation) -> tuple[Slot | None, int, bool]:
        """Return the slot with the longest prefix, its length, and whether to wait for a slot that soon holds more."""
        context = generation.context
        best: Slot | None = None
        best_ready, best_coming = 0, 0
        for slot in self.slots:
            common = common_prefix(context, slot.tokens)
            if self._deterministic and not (common == len(context) == len(slot.tokens)):
                continue
            ready = min(common, slot.ready)
            # A recurrent state can only be continued where it ends.
            is_cut = common < len(slot.tokens) and not self.can_cut
            if is_cut and common < slot.ready:
                ready = 0
            # Without the logits that follow it, the last token must be computed again. In deterministic mode all must:
            # a row must not depend on what else is in its batch.
            if ready == len(context) and (slot.logits is None or len(slot.tokens) != len(context)):
                ready = 0 if self._deterministic or not self.can_cut else ready - 1
            if ready > best_ready or (ready == best_ready and ready and slot.owner is None):
                best, best_ready = slot, ready
            if slot.owner is not None and slot.ready < slot.owner.base and not is_cut:
                best_coming = max(best_coming, common)
        gain = best_coming - best_ready
        is_all = best_coming == len(context)  # for an equal prompt, the next token's logits will be cached, too
        return best, best_ready, gain >= MIN_WAIT_GAIN or (is_all and gain > 0)

    def _fill(self, slot: Slot, tokens: Ints, ready: int, logits: torch.Tensor | None = None) -> None:
        slot.tokens, slot.ready, slot.logits = tokens, ready, logits

    def plan_prefills(self) -> list[Prefill]:
        """Return the prompt tokens to compute in this step: at most ``prefill_chunk``, first come, first served."""
        budget = self.prefill_chunk
        plan = []
        for generation in self.prefilling:
            assert generation.slot is not None
            start = generation.slot.ready
            stop = min(generation.base, start + budget)
            budget -= stop - start
            plan.append(Prefill(generation, start, stop))
            if budget == 0 or self._deterministic:
                break
        return plan

    def complete_prefill(self, prefill: Prefill, logits: torch.Tensor | None = None) -> None:
        """Record that the keys and values of a prefill are computed.

        ``logits`` follow its last token if it was the last part of the prompt.
        """
        generation = prefill.generation
        assert generation.slot is not None
        generation.slot.ready = prefill.stop
        if prefill.is_last:
            generation.slot.logits = logits
            self.prefilling.remove(generation)
            self.decoding.append(generation)

    def release(self, generation: Generation, *, num_ready: int) -> None:
        """Release the slot of a finished generation, which remains as a cache of the first ``num_ready`` tokens."""
        slot = generation.slot
        if slot is None:
            if generation in self.waiting:
                self.waiting.remove(generation)
            return
        (self.decoding if generation in self.decoding else self.prefilling).remove(generation)
        generation.slot = None
        slot.owner = None
        slot.used = self._tick()
        # The cached logits follow the last token of the former contents.
        logits = slot.logits if num_ready == len(slot.tokens) else None
        self._fill(slot, generation.tokens[:num_ready].copy(), num_ready, logits)

    def forget_all(self) -> None:
        """Discard all contents after the weights changed.

        Running generations go back to the head of the queue, in order.
        """
        for generation in reversed(self.running):
            generation.slot = None
            self.waiting.appendleft(generation)
        self.decoding.clear()
        self.prefilling.clear()
        for slot in self.slots:
            slot.owner = None
            self._fill(slot, _NO_TOKENS, 0)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
