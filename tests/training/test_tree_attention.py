"""Attention by plan equals attention over the mask, on every device's path, and is what packs really use."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.training.masks import visible
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, MistralConfig, MistralForCausalLM

from areal_actors.training import tree_attention
from areal_actors.training.batch import TrainingRow
from areal_actors.training.forward import score_pack
from areal_actors.training.packing import (
    build_trie,
    node_depths,
    pack_flat,
    pack_padded,
    pack_tree,
    subtree_ends,
)
from areal_actors.training.tree_attention import (
    BLOCK_ATTENTION,
    SEGMENT_ATTENTION,
    PackMask,
    SegmentPlan,
    padded_length,
    plan_blocks,
    planned_attention,
)

CPU = torch.device("cpu")
PLANNED = (SEGMENT_ATTENTION, BLOCK_ATTENTION)

tries = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6)
windows = st.none() | st.integers(1, 10)


@pytest.fixture(scope="module", autouse=True)
def _flex_attention_trains_on_cpu():
    """The operator has a backward pass on CPUs, which torch refuses because its compiled kernel has none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_flex, "_validate_device", lambda *_: None)
        yield


class Module(torch.nn.Module):
    """What transformers hands to an attention function."""

    num_key_value_groups = 2
    is_causal = True


def merge(found):
    """The trie of these sequences."""
    return build_trie([np.array(ids, dtype=np.int32) for ids in found], list(range(len(found))))


def seen_by(segments, window):
    """The mask by the book, bool [L, L]: ancestors that are nearer than the window."""
    depths = node_depths(segments)
    near = depths[:, None] - depths < (window or len(depths))
    return visible(segments) & near


@pytest.mark.parametrize("name", PLANNED)
@settings(max_examples=12, deadline=None)
@given(found=tries, window=windows, cap=st.sampled_from([None, 2.0]), has_sinks=st.booleans(), seed=st.integers(0, 99))
def test_plan_equals_the_mask(name, found, window, cap, has_sinks, seed):  # noqa: PLR0917 - what is drawn
    """Outputs and all gradients agree on random tries with grouped heads, windows, bounded scores and sinks."""
    segments = merge(found).segments
    length = segments[-1].stop
    total = padded_length(length) if name == BLOCK_ATTENTION else length
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(1, heads, total, 4, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4, generator=generator, requires_grad=True) if has_sinks else None
    trained = inputs if sinks is None else [*inputs, sinks]
    seen = torch.from_numpy(seen_by(segments, window))

    def results(output):
        return output, *torch.autograd.grad(output.square().sum(), trained)

    def attend(*tensors, mask):
        options = {"scaling": 0.3, "sliding_window": window, "softcap": cap, "s_aux": sinks}
        output, _ = AttentionInterface()[name](Module(), *tensors, mask, **options)
        return output[:, :length]

    alone = [tensor[:, :, :length] for tensor in inputs]
    expected = results(attend_plainly(*alone, seen, cap=cap, sinks=sinks))
    for output in (attend(*inputs, mask=PackMask(segments, CPU)), attend(*alone, mask=seen)):
        for ours, theirs in zip(results(output), expected, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)


def attend_plainly(query, key, value, seen, *, cap, sinks):
    """Attention by the book, [1, L, H, D]."""
    key, value = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
    scores = 0.3 * query @ key.mT
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)], -1)
    return (scores.softmax(-1)[..., : value.shape[2]] @ value).transpose(1, 2)


@given(found=tries, window=windows, size=st.integers(1, 5))
def test_blocks_hold_everything_visible(found, window, size):
    """Blocks that are left out hold nothing visible, full ones everything; without a window none is listed in vain."""
    segments = merge(found).segments
    length = segments[-1].stop
    padding = -length % size
    ends = np.concatenate([subtree_ends(segments), np.arange(length, length + padding) + 1])
    seen = np.eye(length + padding, dtype=bool)
    seen[:length, :length] = seen_by(segments, window)

    masked, whole = plan_blocks(ends, np.pad(node_depths(segments), (0, padding)), window=window, size=size)

    for row, tiles in enumerate(np.split(seen, len(seen) // size)):
        partial, full = np.flatnonzero(masked[row]).tolist(), np.flatnonzero(whole[row]).tolist()
        assert not set(partial) & set(full)
        for column, tile in enumerate(np.split(tiles, len(seen) // size, axis=1)):
            assert not tile.any() or column in partial + full
            assert tile.all() or column not in full
            assert tile.any() or column not in partial or window is not None


def test_long_pack_needs_no_square_tensor():
    """Plans of 24k tokens stay below a hundredth of the bytes of a mask of bits."""
    shared, branch = 2048, 2760
    rows = [np.append(np.zeros(shared), np.full(branch, 1 + member)).astype(np.int32) for member in range(8)]
    segments = merge(rows).segments
    sizes = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(found.numel() for found in torch.utils._pytree.tree_leaves(result) if hasattr(found, "numel"))
            return result

    with Largest():
        PackMask(segments, CPU).by_block(None)
        PackMask(segments, CPU).by_block(512)

    length = segments[-1].stop
    assert length > 24_000
    assert max(sizes) <= max(length + 128, (length // 128 + 2) ** 2)


def test_rows_alone_need_no_masks_in_segments():
    """Rows without ancestors are plain causal calls, unless they are longer than a window."""
    segments = tuple(segment.shifted(offset) for offset in (0, 5) for segment in merge([[1, 2, 3, 4, 5]]).segments)

    assert SegmentPlan.create(segments).masks == (None, None)
    assert SegmentPlan.create(segments, window=5).masks == (None, None)
    assert SegmentPlan.create(segments, window=4).masks != (None, None)


def test_lengths_do_not_compile_again(monkeypatch):
    """Five packs compile once, or once more if the first has as many blocks as heads, which torch takes for a rule."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(torch_flex.flex_attention, dynamic=True, fullgraph=True, backend=counter)
    monkeypatch.setattr(tree_attention, "_compiled_attention", lambda _: compiled)
    for length in (100, 300, 700, 20, 520):
        segments = merge(
            [[0] * (length // 2) + [branch] * (length // 4) for branch in range(1, 2 + length % 3)]
        ).segments
        total = padded_length(segments[-1].stop)
        query, key, value = (torch.randn(1, heads, total, 4, requires_grad=True) for heads in (4, 2, 2))
        output, _ = AttentionInterface()[BLOCK_ATTENTION](Module(), query, key, value, PackMask(segments, CPU))
        output.sum().backward()

    assert counter.frame_count <= 2


# ------------------------------------------------------------------------------------------------------- in models


@pytest.fixture(scope="module")
def rows(make_agent_group):
    """Rows of two groups with several tries."""
    episodes = [episode for seed in (0, 1) for episode in make_agent_group(seed).episodes]
    return [
        TrainingRow(
            trajectory=episode.trajectories[0],
            advantages=np.ones(episode.trajectories[0].num_tokens),
            group=index // 4,
        )
        for index, episode in enumerate(episodes)
    ]


def scored(model, pack):
    """Log-probabilities and the gradients of all weights."""
    found = score_pack(model, pack)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return found.logprobs.detach(), torch.autograd.grad(found.logprobs.square().sum(), weights)


def assert_same(found, expected, *, atol):
    assert torch.allclose(found[0], expected[0], atol=atol)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert torch.allclose(ours, theirs, rtol=atol, atol=atol * float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("name", "kind", "pack"),
    [
        (SEGMENT_ATTENTION, "llama", pack_flat),
        (SEGMENT_ATTENTION, "qwen2", pack_tree),
        (BLOCK_ATTENTION, "llama", pack_tree),
        (BLOCK_ATTENTION, "qwen2", pack_flat),
    ],
)
def test_models_attend_by_plan(make_model, rows, name, kind, pack):
    """Every layer asks for the plan; scores and gradients are those of padded rows."""
    (packed,) = pack(rows, range(len(rows)), max_tokens=1000)
    (padded,) = pack_padded(rows, packed.rows, max_tokens=10_000)
    model = make_model(kind).eval()
    logprobs, gradients = scored(model, padded)
    # Padded rows are in another order.
    counts = [len(rows[row].positions) for row in padded.rows]
    parts = dict(zip(padded.rows, logprobs.split(counts), strict=True))
    expected = torch.cat([parts[row] for row in packed.rows]), gradients

    model.set_attn_implementation(name)

    assert_same(scored(model, packed), expected, atol=1e-4)
    mask = PackMask(packed.segments, CPU)
    score_pack(model, packed, mask=mask)
    assert mask.windows == [None] * model.config.num_hidden_layers


@pytest.mark.parametrize("name", PLANNED)
def test_recomputed_layers_attend_by_the_same_plan(make_model, rows, name):
    """Gradients with activation checkpointing equal those without."""
    (packed,) = pack_tree(rows, range(len(rows)), max_tokens=1000)
    model = make_model().eval()
    model.set_attn_implementation(name)
    expected = scored(model, packed)

    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)

    assert_same(scored(model, packed), expected, atol=1e-6)


@pytest.mark.parametrize("name", PLANNED)
def test_plans_work_under_autocast(make_model, rows, name):
    """Queries and keys, which rotary embeddings leave in float32, are cast; the difference is that of bfloat16."""
    (packed,) = pack_tree(rows, range(len(rows)), max_tokens=1000)
    model = make_model().eval()
    model.set_attn_implementation(name)
    expected = scored(model, packed)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scored(model, packed)

    assert (found[0] - expected[0]).abs().mean() < 0.05
    norms = [sum(float(weight.square().sum()) for weight in weights) for weights in (found[1], expected[1])]
    assert norms[0] == pytest.approx(norms[1], rel=0.1)


@pytest.mark.parametrize("name", PLANNED)
def test_windows_reach_back_in_the_row(make_row, name):
    """Branches see the last tokens of their own history, as in a row of their own."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        initializer_range=0.5,
    )
    model = MistralForCausalLM(config).eval()
    found = [
        TrainingRow(
            trajectory=make_row([*range(20), *range(last, last + 20)], np.repeat([0, 1], [10, 30])),
            advantages=np.ones(40),
        )
        for last in (30, 40)
    ]

    ids = torch.stack([torch.tensor(row.trajectory.input_ids, dtype=torch.long) for row in found])
    expected = model(ids).logits[:, 9:-1].log_softmax(-1).gather(-1, ids[:, 10:, None]).reshape(-1)
    model.set_attn_implementation(name)
    (packed,) = pack_tree(found, [0, 1], max_tokens=1000)

    assert torch.allclose(score_pack(model, packed).logprobs, expected, atol=1e-4)


def test_only_sdpa_is_replaced(make_model):
    """An explicit choice stays."""
    model = make_model()
    assert planned_attention(model) == SEGMENT_ATTENTION

    model.set_attn_implementation("eager")

    assert planned_attention(model) is None
