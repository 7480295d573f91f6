"""The number format of ``dtype: auto``: the machine's, unless the environment names one."""

from __future__ import annotations

import pytest

from areal_actors.errors import ConfigError
from areal_actors.lib.precision import AUTO_VARIABLE, choose_dtype, has_fast_bfloat16


def test_auto_dtype_follows_the_hardware():
    """bfloat16 where it is fast, float32 elsewhere; a format by name is obeyed."""
    hardware = "bfloat16" if has_fast_bfloat16("cpu") else "float32"

    assert hardware == choose_dtype("auto", "cpu", environment={})
    assert "float32" == choose_dtype("auto", "mps", environment={})
    assert "bfloat16" == choose_dtype("bfloat16", "cpu", environment={AUTO_VARIABLE: "float32"})


def test_auto_dtype_variable_with_an_unknown_format_is_refused():
    """The message names the variable and its values."""
    with pytest.raises(ConfigError, match="AREAL_AUTO_DTYPE must be one of float32, bfloat16, not 'fp8'"):
        choose_dtype("auto", "cpu", environment={AUTO_VARIABLE: "fp8"})
