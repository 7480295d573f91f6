"""Training on a GPU: the tree layout computes what flat rows do, forward and backward, in float32 and bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.gpu.groups import create_branching
from tests.device.models import FAMILIES, VOCAB_SIZE, create_model

from areal_actors.training.config import Activations, ComputeDtype, Layout, LoraConfig, TrainerConfig
from areal_actors.training.trainer import PolicyTrainer
from areal_actors.training.tree_attention import BLOCK_ATTENTION, SEGMENT_ATTENTION

LENGTHS = (600, 3000)
"""Distinct tokens of a group: less than a block of a sparse kernel in some branches, and many blocks."""


def create_trainer(
    device: str,
    layout: Layout,
    *,
    family: str = "llama",
    dtype: str = "float32",
    **settings: Any,
) -> PolicyTrainer:
    config = TrainerConfig(layout=layout, max_packed_tokens=4096, dtype=ComputeDtype(dtype), device=device, **settings)
    return PolicyTrainer(create_model(device, family=family), config)


def reference_logprobs(model: Any, ids: np.ndarray) -> torch.Tensor:
    """Log-probabilities of a row's tokens under the plain model, float32 [T - 1]."""
    whole = torch.tensor(ids, dtype=torch.long, device=model.device)[None]
    logprobs = model(input_ids=whole, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, whole[0, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.TREE])
def test_scores_are_those_of_plain_rows(device: str, family: str, layout: Layout, num_tokens: int):
    """Each row of a branching group, as the model scores it alone with ordinary attention."""
    rows = create_branching(num_tokens, prompt=300, vocab_size=VOCAB_SIZE).group.rows
    plain = create_model(device, family=family)
    for row, found in zip(rows, create_trainer(device, layout, family=family).logprobs(rows), strict=True):
        with torch.no_grad():
            expected = reference_logprobs(plain, row.input_ids).cpu().numpy() * row.loss_mask[1:]
        np.testing.assert_allclose(found[1:], expected, atol=2e-3)


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.TREE])
def test_bfloat16_stays_close(device: str, layout: Layout, num_tokens: int):
    """Rounding moves log-probabilities by hundredths; a wrong mask moves them by whole nats."""
    rows = create_branching(num_tokens, prompt=300, vocab_size=VOCAB_SIZE).group.rows
    plain = create_model(device)
    gaps = []
    for row, found in zip(rows, create_trainer(device, layout, dtype="bfloat16").logprobs(rows), strict=True):
        with torch.no_grad():
            expected = reference_logprobs(plain, row.input_ids).cpu().numpy()
        gaps.append(np.abs(found[1:] - expected)[row.loss_mask[1:] == 1])
    assert np.concatenate(gaps).mean() < 0.05
    assert np.concatenate(gaps).max() < 0.5


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.TREE])
def test_windows_reach_back_in_the_row(device: str, layout: Layout):
    """Attention by plan is in use, and branches see the last tokens of their own row, not those of the pack."""
    rows = create_branching(3000, prompt=300, vocab_size=VOCAB_SIZE).group.rows
    window = {"use_sliding_window": True, "sliding_window": 200, "max_window_layers": 1}  # of the second layer
    plain, windowed = (create_model(device, family="qwen3", **window) for _ in range(2))
    trainer = PolicyTrainer(windowed, TrainerConfig(layout=layout, dtype=ComputeDtype.FLOAT32, device=device))
    expected_name = BLOCK_ATTENTION if device.startswith("cuda") else SEGMENT_ATTENTION
    assert windowed.config._attn_implementation == expected_name
    for row, found in zip(rows, trainer.logprobs(rows), strict=True):
        with torch.no_grad():
            expected = reference_logprobs(plain, row.input_ids).cpu().numpy() * row.loss_mask[1:]
        np.testing.assert_allclose(found[1:], expected, atol=2e-3)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_step_moves_the_weights_equally_in_both_layouts(device: str, num_tokens: int):
    """In float32."""
    require_equal_gradients(
        *(create_trainer(device, layout) for layout in (Layout.FLAT, Layout.TREE)), num_tokens=num_tokens
    )


@pytest.mark.parametrize("activations", [Activations.AUTO, Activations.RECOMPUTE, Activations.OFFLOAD])
@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.TREE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_pass_keeps_does_not_change_the_gradient(
    device: str, layout: Layout, activations: Activations, dtype: str
):
    """Recomputed and offloaded activations are those that would have been kept."""
    kept = create_trainer(device, layout, dtype=dtype, activations=Activations.KEEP)
    other = create_trainer(device, layout, dtype=dtype, activations=activations)
    # Kernels of a GPU add up in another order each time, and bfloat16 rounds the difference up.
    require_equal_gradients(kept, other, num_tokens=600, tolerance=2e-3 if dtype == "float32" else 2e-2)


def test_an_adapter_learns_equally_in_both_layouts(device: str):
    """After one step, B has a gradient and A has none yet; after two, both have."""
    pytest.importorskip("peft")
    trainers = [create_trainer(device, layout, lora=LoraConfig(rank=4)) for layout in (Layout.FLAT, Layout.TREE)]
    require_equal_gradients(*trainers, num_tokens=3000)
    require_equal_gradients(*trainers, num_tokens=3000, tolerance=2e-2)


def require_equal_gradients(*trainers: PolicyTrainer, num_tokens: int, tolerance: float = 2e-3) -> None:
    """Compare gradients of one group, read from AdamW's first moments, which are a tenth of them after one step."""
    group = create_branching(num_tokens, prompt=300, vocab_size=VOCAB_SIZE).group
    norms = [trainer.train_step([group]).grad_norm for trainer in trainers]
    moments = [
        {name: tensor.float() for name, tensor in trainer._optimizer.state_dict().items() if "exp_avg/" in name}
        for trainer in trainers
    ]
    assert norms[0] == pytest.approx(norms[1], rel=tolerance)
    assert norms[0] > 0
    assert len(moments[0]) == len(moments[1]) > 0
    for name, expected in moments[0].items():
        scale = float(expected.abs().max())
        assert float((moments[1][name] - expected).abs().max()) <= tolerance * scale + 1e-9, name
