"""From the name of a model to its files, and from its files to a policy.

A model is a directory in the layout of transformers (``config.json``, safetensors, a tokenizer with a chat template) or one of
the names in ``BUILT_IN``, which are made once and kept in a cache. Nothing is downloaded.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from attrs import frozen

from areal_actors.errors import ModelError
from areal_actors.models.smollm2 import convert_smollm2
from areal_actors.models.tiny import create_tiny

__all__ = ["BUILT_IN", "ModelFiles", "cache_directory", "load_policy", "resolve_model"]

BUILT_IN: Mapping[str, Callable[[Path], Path]] = {"smollm2-135m-instruct": convert_smollm2, "tiny": create_tiny}
"""Names that need no files of the user, and what makes them: from the cache directory to the model's."""


@frozen(kw_only=True)
class ModelFiles:
    """A model on disk. ``path`` is a directory that transformers and inference servers load as it is."""

    name: str
    path: Path


def cache_directory() -> Path:
    """Where converted models are kept: ``$AREAL_CACHE``, else the user's cache directory."""
    if "AREAL_CACHE" in os.environ:
        return Path(os.environ["AREAL_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "areal_actors"


def resolve_model(name: str, *, cache: Path | None = None) -> ModelFiles:
    """The files of a built-in name or of a directory. Raises ``ModelError`` saying what is missing, and how to get it."""
    if name in BUILT_IN:
        return ModelFiles(name=name, path=BUILT_IN[name](cache or cache_directory()))
    path = Path(name).expanduser()
    if not path.is_dir():
        near = get_close_matches(name, BUILT_IN, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ModelError(
            f"There is no model {name!r}: it is neither a directory nor one of {', '.join(sorted(BUILT_IN))}.{hint}"
        )
    _check_layout(path)
    return ModelFiles(name=path.name, path=path.resolve())


def _check_layout(path: Path) -> None:
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (path / name).is_file()]
    if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        missing.append("*.safetensors")
    if missing:
        raise ModelError(
            f"{path} is no complete model: it lacks {', '.join(missing)}. "
            "Save model and tokenizer there with save_pretrained()."
        )


def load_policy(path: Path, *, dtype: str = "float32") -> Any:
    """The model at ``path`` as a transformers causal LM in evaluation mode. Raises ``ModelError`` if it cannot be read."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"The model in {path} cannot be read: {error}") from error
    return model.eval()
