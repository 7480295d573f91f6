"""Section machine: which GPU this is, and the rates of multiplication and copying that it reaches."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.gpu.cells import Context, synchronise

__all__ = ["datasheet_tflops", "describe_device", "matmul_tflops", "run"]

_DATASHEET = (
    *(("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("H100", 989.0), ("H200", 989.0), ("GH200", 989.0)),
    *(("B200", 2250.0), ("A100", 312.0), ("L40S", 362.0), ("A10G", 70.0), ("RTX 4090", 165.0)),
)
"""Dense bfloat16 TFLOP/s of data sheets, by a part of the name that torch reports."""


def datasheet_tflops(device: str) -> float | None:
    """Return the data sheet's bfloat16 TFLOP/s of this GPU; ``None`` if it is not known."""
    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(0)
    return next((value for part, value in _DATASHEET if part in name), None)


def matmul_tflops(device: str) -> float:
    """Return the rate of a square bfloat16 product: the best of several."""
    size = 8192 if device.startswith("cuda") else 256
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _best_seconds(lambda: left @ right, device, repeats=10) / 1e12


def _best_seconds(operation: Callable[[], object], device: str, *, repeats: int) -> float:
    best = float("inf")
    for _ in range(5):
        synchronise(device)
        started = time.perf_counter()
        for _ in range(repeats):
            operation()
        synchronise(device)
        best = min(best, (time.perf_counter() - started) / repeats)
    return best


def describe_device(device: str) -> dict[str, Any]:
    """Return name, memory, driver and library versions of the device."""
    facts: dict[str, Any] = {"torch": torch.__version__, "device": device}
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": torch.cuda.get_device_name(0),
            "gpu_memory_gib": round(properties.total_memory / (1 << 30), 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
        }
    return facts


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None


def run(context: Context) -> None:
    """Record the ceilings of the device."""
    context.say(str(describe_device(context.device)))
    with context.cell("") as cell:
        cell.add("bfloat16 product", matmul_tflops(context.device), "TFLOP/s", higher_is_better=True)
        num_bytes = (4 << 30) if context.is_cuda else (8 << 20)
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=context.device)
        target = torch.empty_like(source)
        seconds = _best_seconds(lambda: target.copy_(source), context.device, repeats=3)
        cell.add("device copy, read and written", 2 * num_bytes / seconds / 1e9, "GB/s", higher_is_better=True)
