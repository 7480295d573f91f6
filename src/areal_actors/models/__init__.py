"""Models by name: what ``model:`` in a configuration may say, and how it becomes a directory that transformers loads."""

from __future__ import annotations

from areal_actors.models.files import ModelFiles, load_policy, resolve_model

__all__ = ["ModelFiles", "load_policy", "resolve_model"]
