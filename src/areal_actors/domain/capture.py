"""Faults of captured tokens: the values of ``CaptureViolation``'s kind."""

from __future__ import annotations

from enum import StrEnum

LOGPROB_SLACK = 1e-3
"""How far rounding may lift the log-probability of a certain token above 0."""


class CaptureFault(StrEnum):
    """Reasons why tokens cannot be those that the engine sampled."""

    EMPTY_CAPTURE = "empty_capture"
    """An answer was completed without a single token."""
    MISSING_TOKENS = "missing_tokens"
    """The numbers of ids, log-probabilities and versions differ, or are not the number asked for."""
    UNKNOWN_IDS = "unknown_ids"
    """An id is not in the model's vocabulary."""
    IMPOSSIBLE_LOGPROBS = "impossible_logprobs"
    """A log-probability is not finite, or greater than 0."""
    CONSTANT_LOGPROBS = "constant_logprobs"
    """All tokens of an answer have the same log-probability."""
    UNEXPLAINED_LOGPROBS = "unexplained_logprobs"
    """The weights of the stated version give the tokens other log-probabilities."""
    WRONG_VERSION = "wrong_version"
    """The version is missing, or was never published."""
    TOO_STALE = "too_stale"
    """The weights are older than the run allows."""
