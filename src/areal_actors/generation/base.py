"""The ``Engine`` protocol: the interface of every inference engine that can be trained through.

An engine takes prompt ids and streams sampled ids, with their log-probabilities and the version of the weights behind
each token. It knows nothing about messages, chat templates or HTTP. ``generation/torch`` runs in this process; servers
implement the same protocol, and one contract suite (``areal_actors_testing.engine_contract``) covers all of them.

``validate_request`` checks requests for every engine before they are sent, because an id beyond its vocabulary may
crash a server.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NoReturn, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from areal_actors.domain import Chunk, EngineInfo, EngineRequest, EngineStatistics, PauseMode, Snapshot
from areal_actors.errors import ContextLengthExceeded, InvalidRequest

Decode = Callable[[Sequence[int]], str]
"""A function from token ids to text, such as a tokenizer's ``decode``."""


class Engine(Protocol):
    """Prompt ids in, sampled ids out. Opened with ``async with``; all methods are called from one event loop."""

    @property
    def info(self) -> EngineInfo:
        """Return facts that do not change while the engine is open."""
        ...

    @property
    def version(self) -> int:
        """Return the version of the weights with which the next token will be sampled."""
        ...

    def generate(self, request: EngineRequest) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:
        """Open a generation: ``async with engine.generate(request) as chunks: async for chunk in chunks: ...``.

        The stream ends after the chunk that carries ``finish``. Leaving the block early, or being cancelled in it,
        aborts the generation in the engine before the next token.

        Raises:
            ContextLengthExceeded: the prompt leaves no room for one token.
            InvalidRequest: ids are outside the vocabulary, or the grammar is malformed.
            UnsupportedParameter: the engine cannot enforce the grammar.
            EngineError: the engine failed.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a generation with ``FinishReason.ABORT`` after delivering what was sampled. Unknown ids are ignored."""
        ...

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Stop sampling until ``resume``; return once no more tokens are sampled."""
        ...

    async def resume(self) -> None:
        """Continue sampling."""
        ...

    async def load(self, snapshot: Snapshot) -> None:
        """Replace the weights between two tokens.

        Running generations continue, and their next tokens carry the new version. Keys and values computed with the old
        weights are not reused. Raises ``ModelError`` if the snapshot does not fit; the engine then keeps the old
        weights.
        """
        ...

    def statistics(self) -> EngineStatistics:
        """Return the current counters without waiting."""
        ...


@runtime_checkable
class HasFailure(Protocol):
    """An engine that can fail for good, so that only another one can continue."""

    async def wait_failed(self) -> NoReturn:
        """Raise ``EngineError`` once the engine has failed for good; else wait until cancelled."""
        ...


def find_stop_ids(request: EngineRequest) -> frozenset[int]:
    """Return the ids that end this generation: the renderer's and the client's."""
    return frozenset((*request.stop_token_ids, *request.sampling.stop_token_ids))


class StopScanner:
    """Finds the first token that completes one of the ``stop`` strings, by decoding a window of the last tokens.

    A stop string of L characters is searched in the text of at least the last 4 L + 16 tokens, because a token may be a
    third of a character. ``earlier`` are the tokens of the answer that another engine has sampled: a stop string may
    begin with them.
    """

    def __init__(self, stop: tuple[str, ...], decode: Decode, earlier: Iterable[int] = ()) -> None:
        self._stop = stop
        self._decode = decode
        self._window = list(earlier)
        self._keep = 4 * max(map(len, stop)) + 16

    def is_complete(self, token_id: int) -> bool:
        """Add ``token_id``, and return whether the text now contains a stop string."""
        self._window.append(token_id)
        # Trim rarely, so that most tokens do not shift the list.
        if len(self._window) > 2 * self._keep:
            del self._window[: -self._keep]
        text = self._decode(self._window)
        return any(stop in text for stop in self._stop)


def validate_request(request: EngineRequest, info: EngineInfo, *, can_decode: bool) -> None:
    """Raise an error that names the first parameter this engine does not support.

    Raises:
        ContextLengthExceeded: the prompt leaves no room for one token.
        InvalidRequest: the prompt is empty, ids are outside the vocabulary, or a sampling parameter is meaningless.
    """
    if len(request.prompt) == 0:
        raise InvalidRequest("The prompt has no tokens; send at least one.", param="prompt")
    if len(request.prompt) >= info.context_length:
        raise ContextLengthExceeded(num_tokens=len(request.prompt), max_tokens=info.context_length)
    _validate_ids("prompt", request.prompt, info.vocab_size)
    sampling, vocab_size = request.sampling, info.vocab_size
    in_range = {
        "temperature": math.isfinite(sampling.temperature) and sampling.temperature >= 0,
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= 0,
        "min_p": 0 <= sampling.min_p <= 1,
        "max_new_tokens": sampling.max_new_tokens >= 1,
        "frequency_penalty": math.isfinite(sampling.frequency_penalty),
        "presence_penalty": math.isfinite(sampling.presence_penalty),
        "repetition_penalty": math.isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0,
        "top_logprobs": 0 <= sampling.top_logprobs <= vocab_size,
        "logit_bias": all(math.isfinite(bias) for _, bias in sampling.logit_bias),
        "stop": all(sampling.stop),
    }
    for name, is_fine in in_range.items():
        if not is_fine:
            raise InvalidRequest(f"{name} = {getattr(sampling, name)!r} cannot be sampled with.", param=name)
    _validate_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias], vocab_size)
    if sampling.stop and not can_decode:
        raise InvalidRequest(
            "Stop strings need a tokenizer, and this engine was opened without one; send stop_token_ids.", param="stop"
        )


def _validate_ids(name: str, ids: npt.ArrayLike, vocab_size: int) -> None:
    array = np.asarray(ids)
    wrong = array[(array < 0) | (array >= vocab_size)]
    if len(wrong):
        raise InvalidRequest(
            f"Token id {int(wrong[0])} is outside the model's vocabulary of {vocab_size}; "
            "tokenize with this model's own tokenizer.",
            param=name,
        )
