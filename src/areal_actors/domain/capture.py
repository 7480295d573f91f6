"""What can be wrong with captured tokens, by name: what a ``CaptureViolation`` calls its kind."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["LOGPROB_SLACK", "CaptureFault"]

LOGPROB_SLACK = 1e-3
"""How far above 0 rounding may lift the log-probability of a certain token."""


class CaptureFault(StrEnum):
    """Why tokens cannot be what the engine sampled."""

    EMPTY_CAPTURE = "empty_capture"
    """An answer was completed without a single token."""
    MISSING_TOKENS = "missing_tokens"
    """Ids, log-probabilities and versions differ in number, or there are fewer or more than were asked for."""
    UNKNOWN_IDS = "unknown_ids"
    """An id that the model does not have."""
    IMPOSSIBLE_LOGPROBS = "impossible_logprobs"
    """A log-probability that is no finite number, or greater than 0."""
    CONSTANT_LOGPROBS = "constant_logprobs"
    """All tokens of an answer have one and the same log-probability."""
    UNEXPLAINED_LOGPROBS = "unexplained_logprobs"
    """The weights that are said to have sampled give the tokens other log-probabilities."""
    WRONG_VERSION = "wrong_version"
    """No version, or one that was never published."""
    TOO_STALE = "too_stale"
    """Older weights than the run allows."""
