"""The tiny model, made once for all tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_actors.models import resolve_model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny model. Not to be written to."""
    return resolve_model("tiny", cache=tmp_path_factory.mktemp("models")).path
