"""A teacher behind a URL: a server that returns the log-probabilities of the tokens of a prompt.

Three ways to ask for them are tried, in this order::

    POST /v1/completions {prompt: ids, prompt_logprobs: 1}                         vLLM
    POST /generate       {input_ids: ids, logprob_start_len: 0, return_logprob}    SGLang
    POST /v1/completions {prompt: ids, echo: true, logprobs: 1}                    other servers of OpenAI's API

Token ids are sent, never text, so that the teacher scores what the student sampled. That needs the same tokenizer,
which a probe checks: the server's text of each token has to be the student's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import numpy as np
from attrs import field, frozen

from areal_actors.domain import Floats, Ints, as_floats
from areal_actors.errors import ConfigError, EngineError
from areal_actors.generation.servers.http import Answer, ask, create_client, describe_failure
from areal_actors.lib.backoff import backoff_seconds
from areal_actors.lib.telemetry import get_logger

_log = get_logger(__name__)

_NUM_TRIES = 6
_FIRST_WAIT_SECONDS = 1.0
_MAX_WAIT_SECONDS = 30.0
_RETRIED = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS)
_MAX_NAMED = 3
_REPLACEMENT = "\ufffd"


@frozen(kw_only=True)
class Probe:
    """Token ids of the student with the text of each one, in the order in which they may be sent.

    An id that a server does not have may end it (SGLang), so plain words come before special tokens.
    """

    token_ids: Ints = field(eq=False)
    texts: Sequence[str]


@frozen(kw_only=True)
class _Scored:
    """Log-probabilities of all tokens but the first, and the server's text of each token, if it gives them."""

    logprobs: Sequence[float | None]
    texts: Sequence[str | None]


@frozen
class _Way:
    """A way to ask for the log-probabilities of a prompt: the path, the body and how to read an answer.

    ``read`` returns ``None`` for an answer without them. ``has_model`` is false for a server that is told no name.
    """

    path: str
    settings: Mapping[str, object]
    read: Callable[[Mapping[str, Any], list[int]], _Scored | None]
    prompt: str = "prompt"
    """The field of the token ids."""
    has_model: bool = True

    def write(self, ids: list[int], model: str | None) -> Mapping[str, object]:
        named = {"model": model} if self.has_model else {}
        return {**named, self.prompt: ids, **self.settings}


class ServedTeacher:
    """A client of a teacher, which scores up to ``max_concurrent`` sequences at a time. Made by ``open_teacher``."""

    def __init__(self, client: httpx.AsyncClient, way: _Way, *, model: str | None, max_concurrent: int) -> None:
        self._client = client
        self._way = way
        self._model = model
        self._limiter = anyio.CapacityLimiter(max_concurrent)

    async def score(self, token_ids: Ints) -> Floats:
        """Return the log-probability of each token given those before it, float32 [T]; that of the first is 0.

        They are those of the teacher's plain softmax. Temporary failures are retried for about a minute. Raises
        ``EngineError`` naming the server's last answer.
        """
        async with self._limiter:
            scored = await self._ask(token_ids)
        # ``None`` stands for a token whose log-probability the server left out.
        logprobs = np.array([np.nan if value is None else value for value in scored.logprobs], dtype=np.float64)
        if len(logprobs) != len(token_ids) - 1 or np.isnan(logprobs).any():
            raise EngineError(
                f"The teacher {self._client.base_url} returned {int((~np.isnan(logprobs)).sum())} log-probabilities "
                f"for the {len(token_ids) - 1} tokens after the first."
            )
        return as_floats(np.concatenate([[0.0], np.minimum(logprobs, 0.0)]))

    async def _ask(self, token_ids: Ints) -> _Scored:
        ids, problem = token_ids.tolist(), ""
        body = self._way.write(ids, self._model)
        for attempt in range(1, _NUM_TRIES + 1):
            problem = ""
            try:
                answer = await ask(self._client, "POST", self._way.path, body)
            except EngineError as error:
                problem = str(error)
            else:
                found = None if answer.is_error else self._way.read(_document(answer), ids)
                if found is not None:
                    return found
                problem = describe_failure(self._client, self._way.path, answer)
                if not (answer.status in _RETRIED or answer.status >= httpx.codes.INTERNAL_SERVER_ERROR):
                    raise EngineError(f"The teacher cannot score a row of {len(ids)} tokens: {problem}")
            if attempt < _NUM_TRIES:
                _log.warning("teacher_asked_again", attempt=attempt, reason=problem)
                await anyio.sleep(backoff_seconds(attempt, first=_FIRST_WAIT_SECONDS, longest=_MAX_WAIT_SECONDS))
        raise EngineError(f"The teacher did not score a row of {len(ids)} tokens in {_NUM_TRIES} tries: {problem}")


@asynccontextmanager
async def open_teacher(
    url: str,
    *,
    probes: Sequence[Probe],
    model: str | None = None,
    api_key: str | None = None,
    max_concurrent: int = 16,
    timeout_seconds: float = 120.0,
) -> AsyncIterator[ServedTeacher]:
    """Find out how the server at ``url`` is asked, and check with ``probes`` that it has the student's tokenizer.

    ``model`` is the name that the server knows; by default its first one. Raises ``EngineError`` if the server cannot
    be reached, and ``ConfigError`` if it gives no log-probabilities of prompts or has another tokenizer.
    """
    root = url.rstrip("/").removesuffix("/v1")
    async with create_client(root, api_key=api_key, read_timeout_seconds=timeout_seconds) as client:
        if model is None:
            answer = await ask(client, "GET", "v1/models")
            # A server without this route is asked without a name.
            models = [] if answer.is_error else _document(answer).get("data") or []
            model = next((entry["id"] for entry in models if isinstance(entry, Mapping) and "id" in entry), None)
        ids, problems = probes[0].token_ids.tolist(), []
        for way in _WAYS:
            answer = await ask(client, "POST", way.path, way.write(ids, model))
            if not answer.is_error and way.read(_document(answer), ids) is not None:
                break
            said = answer.said if answer.is_error else "no log-probabilities of the prompt"
            problems.append(f"{way.path} answered {answer.status}: {said}")
        else:
            raise ConfigError(
                f"distillation.teacher.url: {client.base_url} returns no log-probabilities of prompts that are token "
                f"ids ({'; '.join(problems)}). Serve the teacher with vLLM or SGLang, or name its directory as "
                "distillation.teacher.model."
            )
        for probe in probes:
            await _check(client, way, probe, model)
        yield ServedTeacher(client, way, model=model, max_concurrent=max_concurrent)


async def _check(client: httpx.AsyncClient, way: _Way, probe: Probe, model: str | None) -> None:
    """Raise ``ConfigError`` if the server's text of any token is another one."""
    ids = probe.token_ids.tolist()
    answer = await ask(client, "POST", way.path, way.write(ids, model))
    found = None if answer.is_error else way.read(_document(answer), ids)
    if found is None:
        raise ConfigError(
            f"distillation.teacher.url: the server refuses token ids of the student, so that its tokenizer is another "
            f"one: {describe_failure(client, way.path, answer)}"
        )
    pairs = list(zip(ids[1:], probe.texts[1:], found.texts, strict=False))
    known = [(token_id, own, their) for token_id, own, their in pairs if their and _REPLACEMENT not in own + their]
    if not known:
        _log.warning("teacher_tokenizer_unchecked", detail=f"{client.base_url} does not return the text of tokens")
    differing = [
        f"{token_id} is {own!r} and {their!r}" for token_id, own, their in known if own.strip() != their.strip()
    ]
    if differing:
        raise ConfigError(
            f"distillation.teacher.url: {client.base_url} has another tokenizer than the student: {len(differing)} of "
            f"{len(known)} token ids differ ({', '.join(differing[:_MAX_NAMED])}). Token ids are compared one by one, "
            "and nothing is aligned by text; use a teacher with the same tokenizer."
        )


def _document(answer: Answer) -> Mapping[str, Any]:
    return answer.document if isinstance(answer.document, Mapping) else {}


def _choice(document: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = document.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}


def _read_vllm(document: Mapping[str, Any], ids: list[int]) -> _Scored | None:
    entries = _choice(document).get("prompt_logprobs")
    if not isinstance(entries, list):
        return None
    # Each entry has the most probable tokens as well, by id.
    own = [(entry or {}).get(str(token_id)) or {} for entry, token_id in zip(entries, ids, strict=False)][1:]
    return _Scored(
        logprobs=[entry.get("logprob") for entry in own], texts=[entry.get("decoded_token") for entry in own]
    )


def _read_sglang(document: Mapping[str, Any], ids: list[int]) -> _Scored | None:
    entries = (document.get("meta_info") or {}).get("input_token_logprobs")
    if not isinstance(entries, list):
        return None
    own = entries[1 : len(ids)]
    return _Scored(logprobs=[entry[0] for entry in own], texts=[entry[2] for entry in own])


def _read_echo(document: Mapping[str, Any], ids: list[int]) -> _Scored | None:
    found = _choice(document).get("logprobs")
    # A server that ignores ``echo`` returns the log-probabilities of the one new token.
    if not isinstance(found, Mapping) or len(found.get("token_logprobs") or ()) < len(ids):
        return None
    texts = found.get("tokens") or [None] * len(ids)
    return _Scored(logprobs=found["token_logprobs"][1 : len(ids)], texts=texts[1 : len(ids)])


_SHORT = {"max_tokens": 1, "temperature": 1.0}
_SGLANG = {
    "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
    "return_logprob": True,
    "logprob_start_len": 0,
    "return_text_in_logprobs": True,
}
# OpenAI's API has no log-probabilities of prompts except by ``echo``, which most servers lack, so it is tried last.
_WAYS = (
    _Way("v1/completions", _SHORT | {"prompt_logprobs": 1}, _read_vllm),
    _Way("generate", _SGLANG, _read_sglang, prompt="input_ids", has_model=False),
    _Way("v1/completions", _SHORT | {"echo": True, "logprobs": 1}, _read_echo),
)
