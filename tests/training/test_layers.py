"""Compiled decoder layers: the same results, one compilation for all layers, and plain layers where it fails."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters

from areal_actors.training.config import LoraConfig, TrainerConfig
from areal_actors.training.layers import compiled_forward, decoder_layers, has_compiled


def test_compiled_layers_compute_what_plain_ones_do(make_model):
    """Forward and gradient of each layer, with the same code for all of them and for other lengths."""
    model = make_model()
    layers = list(decoder_layers(model))
    torch.compiler.reset()
    counters.clear()
    for layer in layers:
        for length in (8, 13, 21):
            compare(model, layer, length)
    assert counters["stats"]["unique_graphs"] <= 8


def compare(model, layer, length):
    torch.manual_seed(length)
    hidden = torch.randn(1, length, model.config.hidden_size, requires_grad=True)
    rotation = model.model.rotary_emb(hidden, torch.arange(length)[None])
    found = []
    for forward in (layer.forward, compiled_forward(layer, backend="aot_eager")):
        model.zero_grad()
        hidden.grad = None
        output = forward(hidden, attention_mask=None, position_embeddings=rotation)
        output.square().sum().backward()
        found.append([output, hidden.grad, *(weight.grad.clone() for weight in layer.parameters())])
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)


def test_layer_that_cannot_be_compiled_runs_as_it_is(make_model, caplog):
    """The log says which and why, once."""
    model = make_model()
    hidden = torch.randn(1, 5, model.config.hidden_size)
    rotation = model.model.rotary_emb(hidden, torch.arange(5)[None])
    for layer in decoder_layers(model):
        assert not has_compiled(model, backend="absent")
        found = compiled_forward(layer, backend="absent")(hidden, attention_mask=None, position_embeddings=rotation)
        torch.testing.assert_close(found, layer(hidden, attention_mask=None, position_embeddings=rotation))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("layers_not_compiled layers=LlamaDecoderLayer reason=Invalid back")


def test_layers_count_as_compiled_once_they_have_run_so_with_gradients(make_model):
    """Before that, they may turn out not to compile, and keep twice as much for the backward pass."""
    model = make_model()
    hidden = torch.randn(1, 5, model.config.hidden_size)
    rotation = model.model.rotary_emb(hidden, torch.arange(5)[None])
    found = []
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            for layer in decoder_layers(model):
                compiled_forward(layer, backend="eager")(hidden, attention_mask=None, position_embeddings=rotation)
        found.append(has_compiled(model, backend="eager"))
    assert [False, True] == found


def test_layers_are_compiled_on_gpus_unless_told_otherwise():
    """The CPU has little to gain from it, and a minute to lose."""
    assert [TrainerConfig().compiles_layers(kind) for kind in ("cuda", "cpu")] == [True, False]
    assert not TrainerConfig(compile_layers=False).compiles_layers("cuda")
    assert TrainerConfig(lora=LoraConfig()).compiles_layers("cuda")
    assert TrainerConfig(compile_layers=True).compiles_layers("cpu")
