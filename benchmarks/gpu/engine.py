"""Section engine: sampled tokens per second at several batch sizes, against ``transformers.generate``.

Prompts have 128 to 512 tokens and nothing stops a generation early. Time is counted from the first submission to the
last token, prompts included, on the clock. transformers gets the same prompts, padded on the left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import anyio
import numpy as np
import torch
from attrs import define, field
from benchmarks.gpu.cells import Cell, Context, peak_gib, reset_peak, synchronise
from benchmarks.gpu.groups import create_prompts
from benchmarks.gpu.models import create_model
from benchmarks.gpu.profiling import profiled, sampled

from areal_actors.domain import EngineRequest, Ints, SampleKey, Sampling
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig

__all__ = ["Timing", "generate_all", "run"]

_LONG_SECONDS = 4.0
"""A run that takes longer is not repeated."""
_GOAL = {32: 5.0}
"""Multiples of ``transformers.generate`` that the engine shall reach, by batch size."""


@define
class Timing:
    """When tokens arrived, in seconds after the first submission."""

    firsts: list[float] = field(factory=list)
    lasts: list[float] = field(factory=list)
    arrivals: list[tuple[float, int]] = field(factory=list)
    """Times with the number of tokens that arrived then."""

    @property
    def decode_rate(self) -> float:
        """Tokens per second while all generations decode; nan if there is no such time."""
        start, stop = max(self.firsts), min(self.lasts)
        number = sum(count for at, count in self.arrivals if start < at <= stop)
        return number / (stop - start) if stop > start else float("nan")


def run(context: Context) -> None:
    """Measure each batch size with the engine and with transformers, on the same model."""
    anyio.run(_run, context)


async def _run(context: Context) -> None:
    model = create_model(context.shape, context.device)
    # The most informative first: with eager decoding, a batch of 256 takes minutes.
    batches = (4, 1) if context.is_quick else (32, 1, 256)
    num_new = 8 if context.is_quick else 128
    lengths = (8, 24) if context.is_quick else (128, 512)
    config = TorchEngineConfig(
        dtype="bfloat16", device=context.device, max_concurrent=max(batches), max_length=1024, num_threads=None
    )
    started = time.perf_counter()
    async with TorchEngine.open(config, model=model) as engine:
        context.say(f"engine opened in {time.perf_counter() - started:.1f} s")
        for batch in batches:
            name = f"batch {batch}"
            rate = baseline = None
            if context.may_begin(name):
                with context.cell(name) as cell:
                    rate = await _measure_batch(cell, engine, batch, lengths, num_new)
            if context.may_begin(f"{name}, transformers"):
                with context.cell(f"{name}, transformers") as cell:
                    baseline = _measure_transformers(cell, model, batch, lengths, num_new)
            if rate is not None and baseline is not None:
                cell, of = Cell(context=context, name=name), f"{context.model}, {name}, transformers, tokens"
                goal, ratio = _GOAL.get(batch), rate / baseline
                cell.add("ratio to transformers", ratio, "ratio", gate=goal, higher_is_better=True, baseline=of)
            if context.has_profile and batch == batches[0] and context.may_begin("profile"):
                with context.cell("profile"):
                    await _profile(context, engine, batch, lengths, num_new)


async def _measure_batch(cell: Cell, engine: TorchEngine, batch: int, lengths: tuple[int, int], num_new: int) -> float:
    context = cell.context
    started = time.perf_counter()
    await generate_all(engine, _prompts(context, batch, lengths, seed=1), num_new=8)
    cell.add("warm-up", time.perf_counter() - started, "s")
    reset_peak(context.device)
    best = 0.0
    for seed in (2, 3):
        if seed > 2 and time.perf_counter() - started > _LONG_SECONDS:
            break
        prompts = _prompts(context, batch, lengths, seed=seed)
        started = time.perf_counter()
        timing = await generate_all(engine, prompts, num_new=num_new)
        rate = batch * num_new / (time.perf_counter() - started)
        if rate > best:
            best, chosen = rate, timing
    cell.add("tokens", best, "tokens/s", higher_is_better=True)
    if np.isfinite(chosen.decode_rate):
        cell.add("tokens while all decode", chosen.decode_rate, "tokens/s", higher_is_better=True)
    cell.add("first token, median", median(chosen.firsts) * 1e3, "ms")
    peak = peak_gib(context.device)
    if peak is not None:
        cell.add("peak memory, with the model twice", peak, "GiB")
    return best


def _prompts(context: Context, batch: int, lengths: tuple[int, int], *, seed: int) -> list[Ints]:
    return create_prompts(batch, lengths, vocab_size=context.shape.vocab_size, seed=seed)


async def generate_all(
    engine: TorchEngine,
    prompts: Sequence[Ints],
    *,
    num_new: int = 1,
    sampling: Sampling | None = None,
    found: dict[int, tuple[list[int], list[float], list[float]]] | None = None,
    timing: Timing | None = None,
    name: str = "",
) -> Timing:
    """Sample ``num_new`` tokens, or what ``sampling`` says, for all prompts at once.

    ``found`` receives ids, log-probabilities and plain ones by the place of the prompt. Calls at the same time need
    different names.
    """
    timing = Timing() if timing is None else timing
    started = time.perf_counter()

    async def consume(number: int, prompt: Ints) -> None:
        request = EngineRequest(
            id=f"{name}-{started}-{number}",
            prompt=prompt,
            sampling=sampling or Sampling(max_new_tokens=num_new),
            key=SampleKey(seed=0, path=(number,)),
        )
        ids, logprobs, raw = [], [], []
        is_first = True
        async with engine.generate(request) as chunks:
            async for chunk in chunks:
                now = time.perf_counter() - started
                if is_first and len(chunk.token_ids):
                    timing.firsts.append(now)
                    is_first = False
                timing.arrivals.append((now, len(chunk.token_ids)))
                ids.extend(chunk.token_ids)
                logprobs.extend(chunk.logprobs)
                raw.extend(chunk.raw_logprobs)
        timing.lasts.append(now)
        if found is not None:
            found[number] = ids, logprobs, raw

    async with anyio.create_task_group() as tasks:
        for number, prompt in enumerate(prompts):
            tasks.start_soon(consume, number, prompt)
    return timing


async def _profile(context: Context, engine: TorchEngine, batch: int, lengths: tuple[int, int], num_new: int) -> None:
    """Write the kernels of some steps in which all of ``batch`` decode."""
    timing, num_steps = Timing(), max(2, num_new // 4)
    async with anyio.create_task_group() as tasks:
        prompts = _prompts(context, batch, lengths, seed=4)
        tasks.start_soon(lambda: generate_all(engine, prompts, num_new=num_new, timing=timing))
        while len(timing.firsts) < batch:  # noqa: ASYNC110  a profiler need not start at once
            await anyio.sleep(0.001)
        before = sum(count for _, count in timing.arrivals)
        with profiled(context) as profile:
            while sum(count for _, count in timing.arrivals) < before + batch * num_steps and not timing.lasts:  # noqa: ASYNC110
                await anyio.sleep(0.001)
            done = (sum(count for _, count in timing.arrivals) - before) / batch
            profile.num_steps = max(done, 1.0)
    with sampled("areal-torch-engine") as host:
        await generate_all(engine, _prompts(context, batch, lengths, seed=5), num_new=num_new)
    text = f"{context.model}, batch {batch}, {done:.1f} decode steps in all\n{profile.table}\n{host.table}"
    context.profile(text)


def _measure_transformers(cell: Cell, model: Any, batch: int, lengths: tuple[int, int], num_new: int) -> float:
    context = cell.context
    _generate(context, model, _prompts(context, batch, lengths, seed=1), 4)
    prompts = _prompts(context, batch, lengths, seed=2)
    rate = batch * num_new / _generate(context, model, prompts, num_new)
    cell.add("tokens", rate, "tokens/s", higher_is_better=True)
    cell.add("first token", _generate(context, model, prompts, 1) * 1e3, "ms")
    return rate


def _generate(context: Context, model: Any, prompts: Sequence[Ints], num_new: int) -> float:
    """Return the seconds that ``generate`` takes to sample ``num_new`` tokens for each prompt."""
    width = max(map(len, prompts))
    ids, mask = (np.zeros((len(prompts), width), dtype=np.int64) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    inputs = {name: tensor.to(context.device) for name, tensor in inputs.items()}
    synchronise(context.device)
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            **inputs, do_sample=True, top_k=0, max_new_tokens=num_new, min_new_tokens=num_new, pad_token_id=0
        )
    synchronise(context.device)
    return time.perf_counter() - started
