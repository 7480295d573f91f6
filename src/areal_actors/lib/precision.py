"""The number format that ``dtype: auto`` selects, for the engine and the trainer.

It depends on the machine. ``AREAL_AUTO_DTYPE`` makes it the same on all machines: the tests set it to float32, and
``AREAL_AUTO_DTYPE=bfloat16 nox -s tests`` runs the same tests in bfloat16, emulated on CPUs that lack it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from areal_actors.errors import ConfigError

AUTO_VARIABLE = "AREAL_AUTO_DTYPE"
"""The environment variable that replaces the check of the hardware."""
_DTYPES = ("float32", "bfloat16")


def choose_dtype(asked: str, device: str, *, environment: Mapping[str, str] | None = None) -> str:
    """Return "float32" or "bfloat16": the format ``asked`` for, or the one that "auto" selects on ``device``.

    Raises ``ConfigError`` if ``AREAL_AUTO_DTYPE`` names another format.
    """
    if asked != "auto":
        return asked
    said = (os.environ if environment is None else environment).get(AUTO_VARIABLE)
    if said and said not in _DTYPES:
        raise ConfigError(f"{AUTO_VARIABLE} must be one of {', '.join(_DTYPES)}, not {said!r}")
    return said or ("bfloat16" if has_fast_bfloat16(device) else "float32")


def has_fast_bfloat16(device: str) -> bool:
    """Return whether ``device`` multiplies bfloat16 in hardware (CUDA; AMX, AVX512-BF16).

    Emulation is slower than float32. The check reads capabilities instead of timing: a machine that is busy for a
    moment must not change what is computed.
    """
    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if not device.startswith("cpu"):
        return False
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))
