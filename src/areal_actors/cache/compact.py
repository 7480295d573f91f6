"""Completions in as little memory as they take: arrays of our own, and one array for what most of them have alike."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import evolve

from areal_actors.domain import Completion, Ints

__all__ = ["Compactor", "own"]


def own(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A read-only copy that keeps no larger buffer alive."""
    copy = array.copy()
    copy.flags.writeable = False
    return copy


class Compactor:
    """Makes completions compact. Most of a session are sampled under one version; they share their versions."""

    def __init__(self) -> None:
        self._versions = _ConstantArrays()

    def __call__(self, completion: Completion) -> Completion:
        """The same completion in arrays of our own."""
        sampled, raw, versions = completion.logprobs, completion.raw_logprobs, completion.versions
        logprobs = own(sampled)
        has_one_version = len(versions) > 0 and bool((versions == versions[0]).all())
        is_same = raw is sampled or np.array_equal(sampled, raw)  # so it is without truncation and penalties
        return evolve(
            completion,
            token_ids=own(completion.token_ids),
            logprobs=logprobs,
            raw_logprobs=logprobs if is_same else own(raw),
            versions=self._versions.repeat(int(versions[0]), len(versions)) if has_one_version else own(versions),
        )


class _ConstantArrays:
    """Read-only arrays of one repeated value."""

    def __init__(self) -> None:
        self._longest: dict[int, Ints] = {}

    def repeat(self, value: int, length: int) -> Ints:
        """``value``, ``length`` times, as a contiguous slice of a shared array."""
        array = self._longest.get(value)
        if array is None or len(array) < length:
            array = self._longest[value] = own(np.full(max(length, 64), value, np.int32))
        return array[:length]
