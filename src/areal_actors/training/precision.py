"""Which number format a machine computes in fastest without losing the updates."""

from __future__ import annotations

import torch

from areal_actors.training.config import ComputeDtype

__all__ = ["compute_dtype", "has_fast_bfloat16"]


def compute_dtype(choice: ComputeDtype, device: torch.device) -> torch.dtype:
    """The format of forward and backward passes on ``device``; weights and moments are float32 whatever it is."""
    if choice is ComputeDtype.AUTO:
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    return torch.bfloat16 if choice is ComputeDtype.BFLOAT16 else torch.float32


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` multiplies bfloat16 matrices in hardware. Elsewhere they are emulated, slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))
