"""Models by name: the values of ``model:`` in a configuration, and the directories that transformers loads for them."""

from __future__ import annotations

from areal_actors.models.catalogue import TRAINED_DOCUMENT, WEIGHTS_DIRECTORY, Catalogue, format_models
from areal_actors.models.files import (
    BUILT_IN,
    ModelFiles,
    cache_directory,
    create_empty_policy,
    load_policy,
    resolve_model,
    resolve_tokenizer,
)
from areal_actors.models.shapes import ModelShape, model_shape, require_fixed_rotation

__all__ = [
    "BUILT_IN",
    "TRAINED_DOCUMENT",
    "WEIGHTS_DIRECTORY",
    "Catalogue",
    "ModelFiles",
    "ModelShape",
    "cache_directory",
    "create_empty_policy",
    "format_models",
    "load_policy",
    "model_shape",
    "require_fixed_rotation",
    "resolve_model",
    "resolve_tokenizer",
]
