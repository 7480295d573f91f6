"""Parsing of the sampling fields that every dialect writes alike.

A dialect reads the fields that it names differently (the limit of new tokens, stop strings, alternatives per token) and
passes them in. ``parameters`` decides which fields a route accepts at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_actors.domain import Sampling
from areal_actors.proxy.fields import read_integer, read_mapping, read_number, wrong

__all__ = ["DEFAULT_MAX_TOKENS", "MAX_TOKENS", "MAX_TOP_LOGPROBS", "read_sampling", "read_seed", "read_stop"]

DEFAULT_MAX_TOKENS = 512
MAX_TOKENS = 2**31 - 1
"""The largest token id, and the largest limit of new tokens."""
MAX_TOP_LOGPROBS = 20
_MAX_STOPS = 16
_MAX_DIGITS = len(str(MAX_TOKENS))


def read_sampling(
    body: Mapping[str, Any], *, max_new_tokens: int, stop: tuple[str, ...], top_logprobs: int = 0
) -> Sampling:
    """Return the sampling parameters: those that the dialect has read, and the shared ones in ``body``.

    Raises:
        InvalidRequest: names the field.
    """
    return Sampling(
        temperature=read_number(body, "temperature", 1.0, low=0, high=2),
        top_p=read_number(body, "top_p", 1.0, low=0, high=1, is_open=True),
        # Both 0 and -1 turn it off.
        top_k=max(read_integer(body, "top_k", 0, low=-1, high=MAX_TOKENS), 0),
        min_p=read_number(body, "min_p", 0.0, low=0, high=1),
        max_new_tokens=max_new_tokens,
        stop=stop,
        stop_token_ids=_read_stop_token_ids(body),
        frequency_penalty=read_number(body, "frequency_penalty", 0.0, low=-2, high=2),
        presence_penalty=read_number(body, "presence_penalty", 0.0, low=-2, high=2),
        repetition_penalty=read_number(body, "repetition_penalty", 1.0, low=0, high=10, is_open=True),
        logit_bias=_read_logit_bias(body),
        top_logprobs=top_logprobs,
    )


def read_seed(body: Mapping[str, Any]) -> int | None:
    """Return the client's seed, or ``None``. Raises ``InvalidRequest``."""
    return read_integer(body, "seed", None, low=-(2**63), high=2**63 - 1)


def read_stop(body: Mapping[str, Any], name: str = "stop") -> tuple[str, ...]:
    """Return the stop strings; a single string counts as one. Raises ``InvalidRequest``."""
    value = body.get(name)
    stops = [value] if isinstance(value, str) else value or []
    is_valid = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    if not is_valid or len(stops) > _MAX_STOPS:
        raise wrong(name, f"a string or up to {_MAX_STOPS} strings, none of them empty", value)
    return tuple(stops)


def _read_stop_token_ids(body: Mapping[str, Any]) -> tuple[int, ...]:
    value = body.get("stop_token_ids") or []
    is_valid = isinstance(value, list) and all(type(token) is int and 0 <= token <= MAX_TOKENS for token in value)
    if not is_valid:
        raise wrong("stop_token_ids", "a list of token ids", value)
    return tuple(value)


def _read_logit_bias(body: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    biases = read_mapping(body, "logit_bias")
    pairs: list[tuple[int, float]] = []
    for name in biases:
        # Only canonical spellings: "7" and "07" would be two biases of one token.
        is_id = name.isascii() and name.isdigit() and len(name) <= _MAX_DIGITS and str(int(name)) == name
        if not is_id or int(name) > MAX_TOKENS:
            raise wrong("logit_bias", "an object whose keys are token ids", name)
        pairs.append((int(name), read_number(biases, name, 0.0, low=-100, high=100)))
    return tuple(sorted(pairs))
