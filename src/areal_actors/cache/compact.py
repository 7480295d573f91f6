"""Compact storage of completions: arrays without spare buffers, and one shared array for equal versions."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import evolve

from areal_actors.domain import Completion, Ints

__all__ = ["Compactor", "own"]


def own(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a read-only copy, which keeps no larger buffer alive."""
    copy = array.copy()
    copy.flags.writeable = False
    return copy


class Compactor:
    """Makes completions compact. Most completions of a session have one version, and share their versions array."""

    def __init__(self) -> None:
        self._versions = _ConstantArrays()

    def __call__(self, completion: Completion) -> Completion:
        """Return the same completion in compact arrays."""
        sampled, raw, versions = completion.logprobs, completion.raw_logprobs, completion.versions
        logprobs = own(sampled)
        has_one_version = len(versions) > 0 and bool((versions == versions[0]).all())
        is_same = raw is sampled or np.array_equal(sampled, raw)  # true without truncation and penalties
        return evolve(
            completion,
            token_ids=own(completion.token_ids),
            logprobs=logprobs,
            raw_logprobs=logprobs if is_same else own(raw),
            versions=self._versions.repeat(int(versions[0]), len(versions)) if has_one_version else own(versions),
        )


class _ConstantArrays:
    """Read-only arrays of a repeated value."""

    def __init__(self) -> None:
        self._longest: dict[int, Ints] = {}

    def repeat(self, value: int, length: int) -> Ints:
        """Return ``value``, ``length`` times, as a contiguous slice of a shared array."""
        array = self._longest.get(value)
        if array is None or len(array) < length:
            array = self._longest[value] = own(np.full(max(length, 64), value, np.int32))
        return array[:length]
