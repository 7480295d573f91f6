"""The steps of accelerators, computed without CUDA graphs: equal to the model's own, whatever the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.generation.torch_operations import TorchOperations, create_graph_runner
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from areal_actors.domain import Snapshot
from areal_actors.errors import ConfigError
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig
from areal_actors.generation.torch.attention import Span
from areal_actors.generation.torch.forward import LlamaForward
from areal_actors.generation.torch.graphs import SlotDecoder, check_room
from areal_actors_testing.engine_contract import collect, join_ids

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LENGTH = 14


def create_models(llama):
    """Without biases, with them, and with norms of heads."""
    torch.manual_seed(0)
    yield llama
    yield Qwen2ForCausalLM(Qwen2Config(vocab_size=96, **SIZES, num_attention_heads=4, num_key_value_heads=1)).eval()
    yield Qwen3ForCausalLM(Qwen3Config(vocab_size=96, **SIZES, **HEADS)).eval()


def test_slot_decoder_equals_the_model(llama):
    """Two sequences that end up in one batch: logits equal those of a plain forward pass."""
    for model in create_models(llama):
        ids = torch.randint(96, (2, LENGTH), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            expected = model(ids).logits
            decoder = SlotDecoder(LlamaForward.of(model), TorchOperations(), num_slots=5, max_length=LENGTH)
            numbers = ids.numpy()
            first = decoder.prefill(
                np.concatenate([numbers[0, :6], numbers[1, :2]]), [Span(3, 0, 6, 0), Span(1, 0, 2, 6)], range(8)
            )
            rest = decoder.prefill(numbers[1, 2:6], [Span(1, 2, 6, 0)], [3])
            slots = torch.tensor([3, 1, decoder.padding_slot])
            steps = [
                decoder.decode(torch.tensor([*ids[:, at], 0]), slots, torch.tensor([at, at, 0]))[:2]
                for at in range(6, LENGTH)
            ]

        torch.testing.assert_close(first, torch.cat([expected[0, :6], expected[1, :2]]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(rest[0], expected[1, 5], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.stack(steps, 1), expected[:, 6:], atol=1e-5, rtol=1e-5)


def test_copied_prefix_is_continued(llama):
    """The copy yields what its source would."""
    ids = np.arange(9)
    with torch.inference_mode():
        decoder = SlotDecoder(LlamaForward.of(llama), TorchOperations(), num_slots=2, max_length=16)
        expected = decoder.prefill(ids, [Span(0, 0, 9, 0)], [8])
        decoder.copy_prefix(0, 1, 7)
        actual = decoder.prefill(ids[7:], [Span(1, 7, 9, 0)], [1])

    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.anyio
async def test_weights_are_replaced_in_place(llama, create_request, recompute):
    """A recorded graph would go on reading the same addresses: fused matrices stay where they are."""
    forwards = []

    def create(forward, config, *, context_length):
        forwards.append(forward)
        return create_graph_runner(forward, config, context_length=context_length)

    new = type(llama)(llama.config).eval()
    config = TorchEngineConfig(dtype="float32", max_concurrent=2)
    async with TorchEngine.open(config, model=llama, create_runner=create) as engine:
        addresses = [layer.qkv.data_ptr() for layer in forwards[0].layers]
        await engine.load(Snapshot(version=1, state=new.state_dict()))
        chunks = await collect(engine, create_request(0, [3, 1, 4], max_new_tokens=6))

    assert addresses == [layer.qkv.data_ptr() for layer in forwards[0].layers]
    np.testing.assert_allclose(
        np.concatenate([c.logprobs for c in chunks]), recompute(new, [3, 1, 4], join_ids(chunks)), atol=1e-4
    )


def test_missing_memory_is_named(llama, monkeypatch):
    """With what is needed, what there is, and the setting that fits."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**33))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    shape = (28, 2, 65, 8, 2048, 128)
    with pytest.raises(ConfigError, match=r"need 14\.2 GiB, .* has 1\.0 GiB left\. Set engine\.max_concurrent to 1 or"):
        check_room(shape, torch.bfloat16, torch.device("cuda"))
    check_room((2, 2, 3, 2, 64, 8), torch.bfloat16, torch.device("cuda"))
