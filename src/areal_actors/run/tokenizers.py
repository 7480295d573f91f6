"""Comparison of tokenizers: whether the token ids of one model mean the same to another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from areal_actors.errors import ConfigError, ModelError
from areal_actors.rendering.base import HasTokenizer, Renderer

__all__ = ["load_vocabulary", "require_contained", "vocabulary_of"]

_MAX_NAMED = 3

Vocabulary = Mapping[int, str]
"""The text of each token by id, in the tokenizer's own spelling."""


def vocabulary_of(renderer: Renderer) -> Vocabulary:
    """Return the vocabulary of a renderer's tokenizer. Raises ``ModelError`` for one that does not provide it."""
    if not isinstance(renderer, HasTokenizer):
        raise ModelError(f"{type(renderer).__name__} has no tokenizer whose token ids could be compared.")
    return {token_id: text for text, token_id in renderer.tokenizer.get_vocab(with_added_tokens=True).items()}


def load_vocabulary(path: Path) -> Vocabulary:
    """Return the vocabulary of the model in a directory. Raises ``ModelError`` if it has no fast tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"No tokenizer can be loaded from {path}: {error}") from error
    return {token_id: text for text, token_id in tokenizer.get_vocab().items()}


def require_contained(part: Vocabulary, whole: Vocabulary, *, what: str) -> None:
    """Raise ``ConfigError`` unless every id of ``part`` is the same token in ``whole``; ``what`` begins the message."""
    differing = [token_id for token_id, text in sorted(part.items()) if whole.get(token_id) != text]
    if differing:
        named = ", ".join(f"{i} is {part[i]!r} and {whole.get(i)!r}" for i in differing[:_MAX_NAMED])
        raise ConfigError(
            f"{what}: {len(differing)} of {len(part)} token ids differ ({named}). Token ids are compared one by one, "
            "and nothing is aligned by text; use a model with the same tokenizer."
        )
