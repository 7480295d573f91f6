"""Sample from a model with the embedded engine, and compare each log-probability with plain transformers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import count
from typing import Any

import anyio
import numpy as np
import torch

from areal_actors.domain import Chunk, EngineRequest, SampleKey, Sampling, Snapshot
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig

TOLERANCE = 1e-3


def check_samples(model: Any, *, max_length: int) -> None:
    """Raise ``AssertionError`` if the log-probability of a sampled token is not that of transformers in float32.

    Generations share prefixes, join and leave, have their prompts in parts, and continue with new weights; the next
    turn of one of them follows. The longest have ``max_length`` tokens, of at least 32.
    """
    found = anyio.run(_deviation, model, max_length)
    if not found <= TOLERANCE:
        raise AssertionError(f"log-probabilities of samples differ by {found:.1e}")


async def _deviation(model: Any, max_length: int) -> float:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(1.05)
    config = TorchEngineConfig(dtype="float32", max_concurrent=4, max_length=max_length, prefill_chunk=7)
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 90, max_length // 2)
    # One prompt twice, and parts of it with other ends.
    prompts = [shared, shared, *(np.concatenate([shared[: 4 * i], rng.integers(3, 90, 1 + i)]) for i in range(4))]
    found: list[tuple[Sequence[int], list[Chunk]]] = []
    async with TorchEngine.open(config, model=model) as engine:
        ids, is_begun = count(), anyio.Event()

        async def sample(prompt: Sequence[int], num_new: int) -> None:
            number = next(ids)
            request = EngineRequest(
                id=f"{number}",
                prompt=np.asarray(prompt),
                sampling=Sampling(max_new_tokens=num_new),
                key=SampleKey(seed=0, path=(number,)),
            )
            chunks: list[Chunk] = []
            async with engine.generate(request) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    is_begun.set()
            found.append((prompt, chunks))

        async with anyio.create_task_group() as tasks:
            for i, prompt in enumerate(prompts):
                tasks.start_soon(sample, prompt, max_length - len(prompt) - 2 * i)
            await is_begun.wait()
            await engine.load(Snapshot(version=1, state=changed.state_dict()))
        prompt, chunks = found[0]
        turn = [*prompt, *_join(chunks), 5, 6][: max_length - 4]
        await sample(turn, 4)
        await sample(turn, 4)
    return max(_compare((model, changed), prompt, chunks) for prompt, chunks in found)


def _join(chunks: Sequence[Chunk]) -> list[int]:
    return [int(token) for chunk in chunks for token in chunk.token_ids]


def _compare(models: Sequence[Any], prompt: Sequence[int], chunks: Sequence[Chunk]) -> float:
    """Return the largest difference in one generation; a token's version is its model's place in ``models``."""
    whole = torch.tensor([*prompt, *_join(chunks)])[None]
    with torch.no_grad():
        plain = [model(input_ids=whole, use_cache=False).logits[0, :-1].float().log_softmax(-1) for model in models]
    by_version = torch.stack([each.gather(-1, whole[0, 1:, None])[:, 0] for each in plain])[:, len(prompt) - 1 :]
    versions = np.concatenate([np.full(len(chunk.token_ids), chunk.version) for chunk in chunks])
    expected = by_version.numpy()[versions, np.arange(len(versions))]
    actual = np.concatenate([chunk.logprobs for chunk in chunks])
    return float(np.abs(np.nan_to_num(actual - expected, nan=np.inf)).max(initial=0.0))
