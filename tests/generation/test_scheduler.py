"""The scheduler: slots hold what was put there, and all generations are admitted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import EngineRequest, SampleKey, Sampling
from areal_actors.generation.torch.scheduler import Generation, Scheduler


def create_generation(number: int, prompt, max_new_tokens: int = 3) -> Generation:
    """A generation that waits."""
    request = EngineRequest(
        id=str(number),
        prompt=prompt,
        key=SampleKey(seed=number),
        sampling=Sampling(max_new_tokens=max_new_tokens),
    )
    return Generation.create(request, context_length=200, decode=None)


class Memory:
    """What a real engine would hold: per slot, the tokens whose keys and values were computed or copied there."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.held: dict[int, list[int]] = {slot.index: [] for slot in scheduler.slots}
        self.prefilled = 0

    def step(self, sample_id: int) -> None:
        """One turn of the engine's loop, every decoding generation sampling ``sample_id``."""
        for admission in self.scheduler.admit():
            source = [] if admission.source is None else self.held[admission.source.index]
            self.held[admission.slot.index] = source[: admission.num_cached]
            expected = admission.generation.context[: admission.num_cached].tolist()
            assert expected == self.held[admission.slot.index]
            assert self.scheduler.can_cut or admission.num_cached in {0, len(source)}
        ready = list(self.scheduler.decoding)
        for prefill in self.scheduler.plan_prefills():
            held = self.held[prefill.generation.slot.index]
            assert len(held) == prefill.start
            assert prefill.stop > prefill.start
            held += prefill.generation.tokens[prefill.start : prefill.stop].tolist()
            self.prefilled += prefill.stop - prefill.start
            self.scheduler.complete_prefill(prefill, logits="logits" if prefill.is_last else None)
        for generation in ready:
            generation.append(sample_id)
            if generation.finish is not None:
                held = generation.context[:-1].tolist()
                self.held[generation.slot.index] = held
                self.scheduler.release(generation, num_ready=len(held))


MODES = ("plain", "deterministic", "recurrent")
prompts_strategy = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=12)


@given(prompts_strategy, st.integers(1, 4), st.integers(1, 24), st.sampled_from(MODES), st.data())
def test_all_generations_are_admitted_eventually(prompts, num_slots, chunk, mode, data):
    """Prefixes come from slots that hold those tokens, chunks tile the rest, all end, also when the weights change."""
    scheduler = Scheduler(num_slots=num_slots, prefill_chunk=chunk, deterministic=mode == "deterministic")
    scheduler.can_cut = mode != "recurrent"
    memory = Memory(scheduler)
    generations = [create_generation(i, prompt) for i, prompt in enumerate(prompts)]
    for generation in generations:
        scheduler.add(generation)
    change_at = data.draw(st.integers(0, 10))
    for turn in range(2000):
        if turn == change_at:
            scheduler.forget_all()
            memory.held = {slot.index: [] for slot in scheduler.slots}
        memory.step(sample_id=turn % 2)
        if all(g.finish is not None for g in generations):
            break

    assert all(g.finish is not None for g in generations)
    assert not scheduler.running
    assert not scheduler.waiting


def test_scheduler_prefills_the_prompt_of_a_group_once():
    """Of eight equal prompts only the first is computed; the others wait for it and copy."""
    scheduler = Scheduler(num_slots=8, prefill_chunk=16)
    memory = Memory(scheduler)
    for number in range(8):
        scheduler.add(create_generation(number, np.arange(50)))
    for _ in range(12):
        memory.step(sample_id=7)

    assert memory.prefilled == 50
    assert not scheduler.running


def test_scheduler_continues_the_next_turn_in_its_slot():
    """A prompt that extends an ended generation takes its slot and all that is there; another one does not."""
    scheduler = Scheduler(num_slots=2, prefill_chunk=64)
    memory = Memory(scheduler)
    first = create_generation(0, np.arange(30))
    scheduler.add(first)
    for _ in range(5):
        memory.step(sample_id=7)
    scheduler.add(create_generation(1, np.concatenate([first.context, [9, 9]])))
    scheduler.add(create_generation(2, np.arange(60, 90)))
    continued, other = scheduler.admit()

    assert continued.source is continued.slot
    assert continued.num_cached == len(first.context) - 1
    assert other.slot is not continued.slot


def test_scheduler_limits_prefill_tokens_per_step():
    """However many prompts wait, a step computes no more than ``prefill_chunk`` of their tokens."""
    scheduler = Scheduler(num_slots=8, prefill_chunk=10)
    for number in range(8):
        scheduler.add(create_generation(number, np.full(37, number)))
    scheduler.admit()
    while prefills := scheduler.plan_prefills():
        assert sum(p.stop - p.start for p in prefills) <= 10
        for prefill in prefills:
            scheduler.complete_prefill(prefill)

    assert len(scheduler.decoding) == 8
