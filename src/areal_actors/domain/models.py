"""Models that runs have trained, by name: ``experiment/trial``."""

from __future__ import annotations

import re
from pathlib import Path

from attrs import frozen

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names that a configuration allows; neither part can leave its directory, because neither begins with a dot."""


def is_model_identifier(text: str) -> bool:
    """Whether ``text`` has the form ``experiment/trial``. That there is such a model is another question."""
    return len(text) <= 255 and _IDENTIFIER.fullmatch(text) is not None  # noqa: PLR2004 - what file systems take


@frozen(kw_only=True)
class TrainedModel:
    """Weights on disk under the name ``experiment/trial``.

    ``path`` is a directory that transformers and inference servers load as it is. ``step`` is how long it was trained
    and ``reward`` the mean reward of that step, where the directory tells. ``saved_at`` is in seconds since 1970; other
    weights under the same name have another.
    """

    name: str
    path: Path
    saved_at: float
    step: int | None = None
    reward: float | None = None
