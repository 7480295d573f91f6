"""Triton kernels against plain torch: on a GPU, or in Triton's interpreter (``TRITON_INTERPRET=1``)."""

from __future__ import annotations

import os

import pytest
import torch
from tests.generation.torch_operations import TorchOperations

from areal_actors.generation.torch.attention import Span
from areal_actors.generation.torch.operations import Cells, HeadNorms, SlotCache, SpanLayout

pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (IS_INTERPRETED or torch.cuda.is_available()):
    pytest.skip("Triton kernels need a GPU", allow_module_level=True)

from areal_actors.generation.torch.kernels import TritonOperations  # noqa: E402  imports Triton

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
# The interpreter cannot multiply bfloat16.
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
TOLERANCES = {torch.float32: {"atol": 1e-5, "rtol": 1e-4}, HALF: {"atol": 3e-2, "rtol": 3e-2}}
LENGTH = 150

pytestmark = pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "dtype"),
    [
        (6, 2, 8, torch.float32),
        (3, 1, 96, torch.float32),
        (14, 2, 64, HALF),
        (16, 8, 128, HALF),
    ],
)


@pytest.fixture(autouse=True)
def generator():
    """Equal numbers in each test."""
    torch.manual_seed(0)


def draw(*shape, dtype=torch.float32) -> torch.Tensor:
    """Normal numbers on the device."""
    return torch.randn(shape).to(DEVICE, dtype)


def create_cache(num_kv_heads, size, dtype) -> SlotCache:
    """Five slots full of numbers, and the same ones again for the other implementation."""
    return SlotCache(*(draw(5, num_kv_heads, LENGTH, size, dtype=dtype) for _ in range(2)))


def test_vectors(num_heads, num_kv_heads, size, dtype):
    """Norms with and without an update of the residual stream, and gates."""
    weight, residual = draw(size * 6, dtype=dtype), draw(7, size * 6)
    for update in (None, draw(7, size * 6, dtype=dtype)):
        copies = residual.clone(), residual.clone()
        actual, expected = (
            operations.normalize(copy, update, weight, 1e-6)
            for operations, copy in zip((TritonOperations(), TorchOperations()), copies, strict=True)
        )
        torch.testing.assert_close(actual, expected, **TOLERANCES[dtype])
        torch.testing.assert_close(*copies)
    gates = draw(7, 2 * 1500, dtype=dtype)
    torch.testing.assert_close(TritonOperations().gate(gates), TorchOperations().gate(gates), **TOLERANCES[dtype])


@pytest.mark.parametrize("has_norms", [False, True])
def test_rotation(num_heads, num_kv_heads, size, dtype, has_norms):
    """Queries come back; keys and values are in the cells of their tokens, and nothing else has changed."""
    qkv = draw(7, (num_heads + 2 * num_kv_heads) * size, dtype=dtype)
    rotation = (draw(LENGTH, size // 2), draw(LENGTH, size // 2))
    cells = Cells(
        torch.tensor([0, 1, 2, 3, 0, 1, 2], device=DEVICE), torch.tensor([5, 77, 149, 0, 6, 99, 64], device=DEVICE)
    )
    norms = HeadNorms(draw(size, dtype=dtype), draw(size, dtype=dtype), 1e-6) if has_norms else None
    cache = create_cache(num_kv_heads, size, dtype)
    other = SlotCache(cache.keys.clone(), cache.values.clone())
    actual = TritonOperations().rotate(qkv, cache, rotation, cells, norms)
    expected = TorchOperations().rotate(qkv, other, rotation, cells, norms)
    for pair in ((actual, expected), (cache.keys, other.keys), (cache.values, other.values)):
        torch.testing.assert_close(*pair, **TOLERANCES[dtype])


@pytest.mark.parametrize("num_rows", [1, 5])
def test_rows(num_heads, num_kv_heads, size, dtype, num_rows):
    """Each row attends to its own length, also where slices of it are empty."""
    cache = create_cache(num_kv_heads, size, dtype)
    cells = Cells(
        torch.tensor([0, 1, 2, 3, 4], device=DEVICE)[-num_rows:],
        torch.tensor([5, 77, 0, 64, 149], device=DEVICE)[-num_rows:],
    )
    q = draw(num_rows, num_heads, size, dtype=dtype)
    actual, expected = (
        operations.attend_rows(q, cache, cells, size**-0.5) for operations in (TritonOperations(), TorchOperations())
    )
    torch.testing.assert_close(actual, expected, **TOLERANCES[dtype])


def test_spans(num_heads, num_kv_heads, size, dtype):
    """Whole prompts, later chunks and single tokens in one batch."""
    cache = create_cache(num_kv_heads, size, dtype)
    spans = [Span(0, 0, 70, 0), Span(2, 60, 149, 70), Span(3, 149, 150, 159)]
    step = TritonOperations.tile_size
    tiles = [
        (s.slot, at, s.offset + at - s.start, min(step, s.stop - at))
        for s in spans
        for at in range(s.start, s.stop, step)
    ]
    layout = SpanLayout(spans, torch.tensor(tiles, dtype=torch.int32, device=DEVICE))
    q = draw(160, num_heads, size, dtype=dtype)
    actual, expected = (
        operations.attend_spans(q, cache, layout, size**-0.5) for operations in (TritonOperations(), TorchOperations())
    )
    torch.testing.assert_close(actual, expected, **TOLERANCES[dtype])
