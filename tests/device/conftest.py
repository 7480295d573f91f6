"""The device that these tests run on: CUDA, or the one in ``AREAL_TEST_DEVICE``.

They need neither the fixtures nor the plugins of the rest of the suite, so that they run where only pytest is
installed: ``pytest tests/device -c tests/device/pytest.ini --confcutdir tests/device``.
"""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """Name of the device; the test is skipped if this machine has none."""
    name = os.environ.get("AREAL_TEST_DEVICE", "cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    # TF32 would hide mistakes behind its rounding.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return name
