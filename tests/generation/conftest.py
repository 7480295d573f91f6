"""Tiny models and requests of the engine tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.generation.tiny_models import create_llama
from transformers import LlamaForCausalLM

from areal_actors.domain import EngineRequest, Floats, SampleKey, Sampling, as_floats


@pytest.fixture(name="create_llama")
def provide_create_llama() -> Callable[..., LlamaForCausalLM]:
    """See ``tiny_models``."""
    return create_llama


@pytest.fixture
def llama() -> LlamaForCausalLM:
    """One of them, of 96 tokens."""
    return create_llama()


@pytest.fixture
def create_request() -> Callable[..., EngineRequest]:
    """Requests whose id and key come from a number; further arguments are fields of ``Sampling``."""

    def create(number: int, prompt, **sampling) -> EngineRequest:
        return EngineRequest(
            id=str(number), prompt=prompt, sampling=Sampling(**sampling), key=SampleKey(seed=1, path=(number,))
        )

    return create


@pytest.fixture
def recompute() -> Callable[..., Floats]:
    """Log-probabilities of an output by a plain forward pass of a model."""

    def run(model, prompt, output) -> Floats:
        ids = torch.tensor(np.concatenate([prompt, output]), dtype=torch.long)
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1].float(), -1)
        return as_floats(logprobs.gather(1, ids[len(prompt) :, None])[:, 0])

    return run
