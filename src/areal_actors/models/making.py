"""Making a model directory exactly once, however many processes want it at the same time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from areal_actors.errors import ModelError

__all__ = ["make_once"]


def make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """``target``, filled by ``make`` unless it exists. It appears complete or not at all; the first of several makers wins.

    Raises ``ModelError`` if the disk refuses.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            make(partial)
            _publish(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"{target} cannot be written: {error}. Free space there, or set AREAL_CACHE to another directory."
        ) from error
    return target


def _publish(partial: Path, target: Path) -> None:
    """Give the finished directory its name; one that another process published first is as good."""
    partial.chmod(0o755)
    try:
        os.rename(partial, target)
    except OSError:
        if not target.is_dir():
            raise
