"""The embedded engine against ``transformers.generate``: tokens per second, prefix cache, loop lag, first tokens.

Both compute in the format that ``engine.dtype: auto`` selects on this machine. Tokens are counted per CPU second and
per second on the clock: the engine keeps all cores busy for a larger part of the time. Each uses the cores alone, as in
a run, which ends the OpenMP team of a thread that waits (``lib/openmp.py``).

Also the costs of a grammar (a call of one of five tools, token by token, and compiled for the first time), and of a
batch of 256 without a model: scheduling, random numbers, stop checks and streams.

The model has the shape of a 135M Llama (30 layers, 9 query and 3 key heads) and random weights, which cost what trained
ones do; ``quick`` keeps the width and takes 6 of the layers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import permutations
from statistics import median
from typing import Any

import anyio
import numpy as np
import torch
from attrs import frozen
from benchmarks.harness import Result
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from areal_actors.domain import EngineRequest, Exactly, Grammar, Ints, SampleKey, Sampling, Tool, as_ints
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig
from areal_actors.generation.torch.constraint import GrammarCompiler
from areal_actors.generation.torch.forward import Forward
from areal_actors.generation.torch.sampler import Sample
from areal_actors.generation.torch.scheduler import Admission, Generation, Prefill
from areal_actors.generation.torch.worker import Step
from areal_actors.lib.openmp import end_team
from areal_actors.lib.precision import choose_dtype
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.rendering.parsers import TOOL_FORMATS

VOCAB_SIZE = 49152
PROMPT_LENGTH = 128
NUM_NEW = 24


def run(quick: bool) -> list[Result]:  # noqa: FBT001  the harness calls all benchmarks so
    """All figures, on as many threads as torch has."""
    dtype = choose_dtype("auto", "cpu")
    model = _create_model(num_layers=6 if quick else 30).to(getattr(torch, dtype))
    return anyio.run(_measure, model, dtype)


async def _measure(model: Any, dtype: str) -> list[Result]:
    rng = np.random.default_rng(0)
    results = []
    async with TorchEngine.open(TorchEngineConfig(dtype=dtype), model=model) as engine:
        await _generate_all(engine, _create_prompts(rng, 2), num_new=4)  # buffers grow, threads start
        for batch in (1, 8, 32):
            prompts = _create_prompts(rng, batch)
            baseline = _measure_transformers(model, prompts)
            results += _compare(f"batch {batch}", await _measure_engine(engine, prompts), baseline, dtype)
        group = [prompt for prompt in _create_prompts(rng, 4) for _ in range(8)]
        baseline = _measure_transformers(model, group)
        results += _compare("4 groups of 8", await _measure_engine(engine, group), baseline, dtype)
        again = await _measure_engine(engine, group)
        results.append(_result("4 groups of 8, prompts cached", again.per_cpu_second, "tokens/CPU s"))
        results += await _measure_loop(engine, rng)
    return [*results, await _measure_bookkeeping(model, rng), *await _measure_grammars(model, rng)]


def _create_model(*, num_layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def _create_prompts(rng: np.random.Generator, number: int) -> list[Ints]:
    return [as_ints(rng.integers(0, VOCAB_SIZE, PROMPT_LENGTH)) for _ in range(number)]


@frozen
class _Rate:
    """Sampled tokens per second, prompts included."""

    per_cpu_second: float
    per_second: float


class _Stopwatch:
    """Runs from when it is created."""

    def __init__(self) -> None:
        self._cpu, self._clock = time.process_time(), time.perf_counter()

    def rate(self, num_tokens: int) -> _Rate:
        """The rate at which so many tokens were sampled since."""
        return _Rate(num_tokens / (time.process_time() - self._cpu), num_tokens / (time.perf_counter() - self._clock))


def _measure_transformers(model: Any, prompts: Sequence[Ints]) -> _Rate:
    """The rate of ``generate``, prompts included."""
    ids = torch.from_numpy(np.stack(prompts).astype(np.int64))
    watch = _Stopwatch()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=NUM_NEW,
            min_new_tokens=NUM_NEW,
            pad_token_id=0,
        )
    rate = watch.rate(len(prompts) * NUM_NEW)
    end_team()
    return rate


async def _measure_engine(engine: TorchEngine, prompts: Sequence[Ints], *, grammar: Grammar | None = None) -> _Rate:
    """The rate of the engine, prompts, streams and log-probabilities included."""
    watch = _Stopwatch()
    await _generate_all(engine, prompts, num_new=NUM_NEW, grammar=grammar)
    return watch.rate(len(prompts) * NUM_NEW)


async def _generate_all(
    engine: TorchEngine, prompts: Sequence[Ints], *, num_new: int, grammar: Grammar | None = None
) -> list[float]:
    """Run all prompts at once; seconds until the first token of each."""
    firsts: list[float] = []
    started = time.perf_counter()

    async def consume(number: int, prompt: Ints) -> None:
        request = EngineRequest(
            id=f"{started}-{number}",
            prompt=prompt,
            sampling=Sampling(max_new_tokens=num_new),
            key=SampleKey(seed=0, path=(number,)),
            grammar=grammar,
        )
        async with engine.generate(request) as chunks:
            await anext(aiter(chunks))
            firsts.append(time.perf_counter() - started)
            async for _ in chunks:
                pass

    async with anyio.create_task_group() as tasks:
        for number, prompt in enumerate(prompts):
            tasks.start_soon(consume, number, prompt)
    return firsts


async def _measure_loop(engine: TorchEngine, rng: np.random.Generator) -> list[Result]:
    """How late a 1 ms ticker is while 32 generations run, and when their first tokens come."""
    delays: list[float] = []

    async def tick() -> None:
        while True:
            start = time.perf_counter()
            await anyio.sleep(0.001)
            delays.append((time.perf_counter() - start - 0.001) * 1e3)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        firsts = await _generate_all(engine, _create_prompts(rng, 32), num_new=8)
        tasks.cancel_scope.cancel()
    return [
        _result("loop lag, worst", max(delays), "ms", higher_is_better=False),
        _result("loop lag, 99th percentile", float(np.percentile(delays, 99)), "ms", higher_is_better=False),
        _result("first token of 32, median", median(firsts) * 1e3, "ms", higher_is_better=False),
        _result("first token of 32, first", min(firsts) * 1e3, "ms", higher_is_better=False),
    ]


class _NoModel:
    """A runner whose steps cost nothing and always yield the same token."""

    is_ahead = True

    def __init__(self, _forward: Forward, _config: TorchEngineConfig, *, context_length: int) -> None:  # noqa: ARG002  interface
        self._logits = torch.zeros(1)

    def admit(self, admission: Admission) -> None:
        """Nothing is copied."""

    def forget(self, generation: Generation) -> None:
        """Nothing is kept."""

    def release(self, generation: Generation) -> int:
        """All but the last token could be used again."""
        return 0 if generation.slot is None else max(generation.base, generation.length - 1)

    def launch(self, decoding: Sequence[Generation], ready: Sequence[Generation], prefills: Sequence[Prefill]) -> Step:
        """A token of each generation."""
        order = [*decoding, *ready, *(p.generation for p in prefills if p.is_last)]
        for generation in order:
            generation.uniform()
        results = torch.tensor([[7.0], [-1.0], [-1.0], [1.0]]).expand(-1, len(order))
        return Step(order, [Sample(results, len(order))], [self._logits for p in prefills if p.is_last])


async def _measure_bookkeeping(model: Any, rng: np.random.Generator) -> Result:
    config = TorchEngineConfig(max_concurrent=256, prefill_chunk=1_000_000)
    async with TorchEngine.open(config, model=model, create_runner=_NoModel) as engine:
        start = time.process_time()
        await _generate_all(engine, _create_prompts(rng, 256), num_new=100)
        seconds = time.process_time() - start
    return _result("batch 256 without a model", 256 * 100 / seconds, "tokens/CPU s")


async def _measure_grammars(model: Any, rng: np.random.Generator) -> list[Result]:
    """CPU time of compiling the calls of five tools, and of sampling the same batch with and without holding it."""
    tokenizer = _create_tokenizer()
    prompts = _create_prompts(rng, 8)
    calls = TOOL_FORMATS["hermes"].constrain([_create_tool(number) for number in range(5)], is_parallel=True)
    assert calls is not None
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE)
    await compiler.compile(Exactly(text="loads the library"), stop_ids=frozenset())
    start = time.process_time()
    await compiler.compile(calls, stop_ids=frozenset())
    compiling = time.process_time() - start
    async with TorchEngine.open(TorchEngineConfig(), model=model, tokenizer=tokenizer) as engine:
        await _generate_all(engine, prompts, num_new=2, grammar=calls)  # compiled, and the prompts are cached
        free = max([(await _measure_engine(engine, prompts)).per_cpu_second for _ in range(3)])
        held = max([(await _measure_engine(engine, prompts, grammar=calls)).per_cpu_second for _ in range(3)])
    return [
        _result("five tools compiled", compiling * 1e3, "ms", higher_is_better=False),
        _result("batch 8, free", free, "tokens/CPU s"),
        _result("batch 8, under a grammar", held, "tokens/CPU s"),
        Result(
            benchmark="engine",
            name="batch 8, CPU per token under a grammar",
            value=free / held,
            unit="ratio",
            gate=1.5,
            higher_is_better=False,
            baseline="batch 8, free",
        ),
    ]


def _create_tokenizer() -> Tokenizer:
    """The tiny model's, with as many words more as the vocabulary of the model has room for."""
    settings = json.loads(create_tiny_tokenizer().backend_tokenizer.to_str())
    words = (f"{start}{word}" for word in permutations("etaoinshrdl", 5) for start in ("", "Ġ"))
    vocabulary = settings["model"]["vocab"]
    vocabulary |= zip(words, range(len(vocabulary), VOCAB_SIZE), strict=False)
    return Tokenizer.from_str(json.dumps(settings))


def _create_tool(number: int) -> Tool:
    """A tool as agents have them."""
    properties = {
        "city": {"type": "string"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        f"option_{number}": {"type": "array", "items": {"type": "string"}},
    }
    return Tool(name=f"tool_{number}", parameters={"type": "object", "properties": properties, "required": ["city"]})


def _compare(name: str, engine: _Rate, baseline: _Rate, dtype: str) -> list[Result]:
    results = []
    for unit, own, other in (
        ("tokens/CPU s", engine.per_cpu_second, baseline.per_cpu_second),
        ("tokens/s", engine.per_second, baseline.per_second),
    ):
        of = f"{name}, transformers.generate, {unit}"
        ratio = Result(
            benchmark="engine",
            name=f"{name}, ratio of {unit}",
            value=own / other,
            unit="ratio",
            gate=1.0,
            higher_is_better=True,
            baseline=of,
            detail={"dtype": dtype},
        )
        results += [_result(of, other, unit), _result(f"{name}, {unit}", own, unit), ratio]
    return results


def _result(name: str, value: float, unit: str, *, higher_is_better: bool = True) -> Result:
    return Result(benchmark="engine", name=name, value=value, unit=unit, higher_is_better=higher_is_better)
