"""The log-probabilities of an answer's tokens in the format of OpenAI's endpoints, from the captured completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from areal_actors.domain import Completion

__all__ = ["Decode", "format_logprobs"]

Decode = Callable[[Sequence[int]], str]
"""A function that returns the text of token ids."""


def format_logprobs(completion: Completion, decode: Decode | None) -> list[dict[str, Any]]:
    """Return one entry per sampled token; without ``decode``, ids are shown as numbers."""
    tokens = completion.token_ids.tolist()
    logprobs = completion.logprobs.tolist()
    tops = completion.top_logprobs or ((),) * len(tokens)
    content = []
    for token, logprob, top in zip(tokens, logprobs, tops, strict=True):
        entry = _format_token(token, logprob, decode)
        entry["top_logprobs"] = [_format_token(other.token_id, other.logprob, decode) for other in top]
        content.append(entry)
    return content


def _format_token(token: int, logprob: float, decode: Decode | None) -> dict[str, Any]:
    """Return one token's entry; ``bytes`` is ``null`` for a part of a character."""
    if decode is None:
        return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}
    text = decode((token,))
    # A token may end within a UTF-8 sequence; its decoded text then holds U+FFFD and its bytes are not known from it.
    is_whole = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_whole else None}
