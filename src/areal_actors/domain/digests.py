"""Digests that bind a row to the answers of the engine: engine answer -> turn -> row.

A turn's digest is made when its answer is complete, and follows it through the tree, the journal and the rows. It is
text with parts in hexadecimal, joined by colons::

    tokens : raw : turn [: restated ...]

``tokens`` covers all ids of the prompt and the output. It does not depend on where turns begin, so that a row that
holds the ids only as context can be checked, and a turn extends the hash of the one that it follows: a turn costs time
linear in its new tokens. ``raw`` covers the log-probabilities of the plain softmax. ``turn`` covers both, the name of
the turn, the log-probabilities and the versions.

A process that resumes from older weights attributes the tokens of lost versions to the weights that it has. It appends
a part that covers the part before it and the new versions, so that the earlier statement is still bound.

The digests are plain BLAKE2b. They detect errors and changes, and prove nothing about a writer who computes them again;
for that, dumps of rows are sealed with a key (``interchange.seals``).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np

from areal_actors.domain.chat import InteractionId
from areal_actors.domain.sampling import Completion, Floats, Ints

_SIZE = 32
# Copies cost a tenth of the time of a new hash with a label.
_TOKENS = blake2b(digest_size=_SIZE, person=b"areal tokens")
_TURN = blake2b(digest_size=_SIZE, person=b"areal turn")
_RAW = blake2b(digest_size=_SIZE, person=b"raw")
_FLOAT32, _INT32 = np.dtype(np.float32), np.dtype(np.int32)

TokenHash: TypeAlias = blake2b
"""The hash of the ids so far, which can be copied, and extended by the data of further ids (int32 [T])."""


def create_token_hash() -> TokenHash:
    """Return the hash of no ids."""
    return _TOKENS.copy()


def digest_tokens(token_ids: Ints) -> str:
    """Return the digest of ids, int32 [T]."""
    digest = create_token_hash()
    digest.update(_bytes(token_ids, _INT32))
    return digest.hexdigest()


def digest_turn(name: InteractionId, tokens: str, completion: Completion) -> str:
    """Return the digest of a turn, whose prompt and output have the digest ``tokens``."""
    raw = _hash(completion.raw_logprobs)
    return f"{tokens}:{raw}:{_link(name, tokens, raw, completion.logprobs, completion.versions)}"


def restate_digest(digest: str, name: InteractionId, completion: Completion) -> str:
    """Return the digest of a turn whose versions were replaced by those of ``completion``; it contains ``digest``."""
    tokens, raw, *chain = digest.split(":")
    link = _link(name, tokens, raw, completion.logprobs, completion.versions, before=chain[-1])
    return f"{digest}:{link}"


def is_turn_digest(
    digest: str, name: InteractionId, *, logprobs: Floats, versions: Ints, raw_logprobs: Floats | None = None
) -> bool:
    """Return whether a turn with these columns, float32 and int32 [T], has ``digest``. ``None`` is not checked."""
    tokens, raw, *chain = digest.split(":")
    if raw_logprobs is not None and raw != _hash(raw_logprobs):
        return False
    before = chain[-2] if len(chain) > 1 else ""
    return bool(chain) and chain[-1] == _link(name, tokens, raw, logprobs, versions, before=before)


def _link(name: InteractionId, tokens: str, raw: str, logprobs: Floats, versions: Ints, *, before: str = "") -> str:
    # Lengths first, so that no two different turns give the same bytes.
    label = name.encode("utf-8", "surrogatepass")
    head = f"{before}:{tokens}:{raw}:{len(label)}:{len(logprobs)}:{len(versions)}:".encode()
    digest = _TURN.copy()
    digest.update(b"".join((head, label, _bytes(logprobs, _FLOAT32), _bytes(versions, _INT32))))
    return digest.hexdigest()


def _hash(values: Floats) -> str:
    digest = _RAW.copy()
    digest.update(_bytes(values, _FLOAT32))
    return digest.hexdigest()


def _bytes(values: Floats | Ints, kind: np.dtype[Any]) -> bytes:
    # A copy: numpy keeps 72 bytes with each array whose buffer was ever exported, and the tree keeps the arrays.
    return (values if values.dtype == kind else values.astype(kind)).tobytes()
