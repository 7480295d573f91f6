"""Trained models: their names, and where their weights are."""

from __future__ import annotations

import re
from pathlib import Path

from attrs import frozen

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names that a configuration allows. Neither part can leave its directory, because neither begins with a dot."""


def is_model_identifier(text: str) -> bool:
    """Return whether ``text`` has the form ``experiment/trial``. It does not check that such a model exists."""
    return len(text) <= 255 and _IDENTIFIER.fullmatch(text) is not None  # noqa: PLR2004 - what file systems take


@frozen(kw_only=True)
class TrainedModel:
    """Weights on disk under the name ``experiment/trial``.

    ``path`` is a directory that transformers and inference servers can load. ``step`` is the number of trained steps
    and ``reward`` the mean reward of the last one, if the directory records them. ``saved_at`` is in seconds since
    1970; it tells different weights under the same name apart.
    """

    name: str
    path: Path
    saved_at: float
    step: int | None = None
    reward: float | None = None
