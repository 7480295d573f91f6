"""Inference with a trained model by experiment and trial, from Python: ``RemoteSGLangEngine``.

The name is the one that programs of other systems import. Who answers is either a service of this library that runs
somewhere and is asked over HTTP (``_OverHttp``), or the embedded engine with the weights from this machine's disk
(``_AtHome``). Both read the same request, in the words of OpenAI's protocol.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import anyio
import httpx
from attrs import asdict, evolve, frozen

from areal_actors.actors.models import ModelStack
from areal_actors.client import create_http_client
from areal_actors.client.http import error_of
from areal_actors.core.hosting import Host
from areal_actors.core.loops import loop_identity
from areal_actors.domain import Answer, CompletionRequest, Credential, TrainedModel
from areal_actors.errors import ConfigError, InvalidRequest, ModelError, Unavailable
from areal_actors.messages import Complete, ForgetSession, OpenSession
from areal_actors.models import Catalogue
from areal_actors.proxy.chat_request import parse_chat_request
from areal_actors.proxy.raw_request import parse_raw_request
from areal_actors.run.inference import InferenceConfig
from areal_actors.run.models import ModelOpener
from areal_actors.workflows.generation import GenerationConfig, ModelRequest

__all__ = ["GeneratedText", "RemoteSGLangEngine"]

_URL_VARIABLES = ("AREAL_BASE_URL", "OPENAI_BASE_URL")
_KEY_VARIABLES = ("AREAL_API_KEY", "OPENAI_API_KEY")
_FORGET_SECONDS = 5.0


@frozen(kw_only=True)
class GeneratedText:
    """One answer. ``stop_reason`` is ``stop`` or ``length``; ``model`` is the ``experiment/trial`` that answered.

    ``output_tokens`` and ``output_logprobs`` are the sampled ids and their log-probabilities where the weights are on
    this machine; a service answers in text alone, and they are ``None``.
    """

    text: str
    model: str
    stop_reason: str
    input_len: int
    output_len: int
    output_tokens: tuple[int, ...] | None = None
    output_logprobs: tuple[float, ...] | None = None


class _Answerer(Protocol):
    """What generates: elsewhere, or at home."""

    async def answer(self, body: Mapping[str, Any]) -> GeneratedText:
        """Answer a request of OpenAI's protocol; a plain completion where it has a ``prompt``."""
        ...

    async def aclose(self) -> None:
        """Free what was opened; it opens again when it is asked again."""
        ...

    def close_soon(self) -> None:
        """The same, without waiting for it."""
        ...


class RemoteSGLangEngine:
    """Generates with the weights that a run has trained. ``config`` are settings of the embedded engine, if it is used.

    ::

        engine = RemoteSGLangEngine()
        engine.initialize(experiment_name="my-model", trial_name="2025-10-23-run-1")
        response = await engine.agenerate(prompt="What is reinforcement learning?")
        print(response.text)
        await engine.aclose()

    What it needs is opened by the first ``agenerate``, in the event loop that awaits it, asyncio or trio. ``async
    with`` closes it at the end of a block. A loop that ends closes it, too.
    """

    def __init__(self, config: InferenceConfig | None = None) -> None:
        self._config = config or InferenceConfig()
        self._answerer: _Answerer | None = None
        self._user: str | None = None

    def initialize(
        self,
        *,
        experiment_name: str,
        trial_name: str | None = None,
        user: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        fileroot: Path | str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Say which model it is; nothing is loaded yet.

        Args:
            experiment_name: the experiment.
            trial_name: its trial; may be left out at home, where only one trial has weights.
            user: who asks, told to a service.
            base_url: a service that is running, such as ``http://host:8000/v1``; else ``AREAL_BASE_URL`` or
                ``OPENAI_BASE_URL`` of the environment. Without any, the weights are taken from ``fileroot``.
            api_key: the key of a session there, or the admin key; else ``AREAL_API_KEY`` or ``OPENAI_API_KEY``.
            fileroot: where runs are written on this machine, ``runs`` by default. Naming it decides for the weights at
                home, whatever the environment says.
            environment: read in the place of the process's own.

        Raises:
            ModelError: there are no such weights; says which there are. A service is not asked yet.
            ConfigError: ``base_url`` and ``fileroot`` contradict each other, or a service is asked for no trial.
        """
        if base_url is not None and fileroot is not None:
            raise ConfigError("base_url asks a service and fileroot takes weights from disk; name one of them.")
        found = os.environ if environment is None else environment
        url = base_url or (_first(found, _URL_VARIABLES) if fileroot is None else None)
        name = experiment_name if trial_name is None else f"{experiment_name}/{trial_name}"
        self._user = user
        self.destroy()
        if url is None:
            model = Catalogue(root=Path(fileroot or "runs")).find(name)
            self._answerer = _AtHome(model, self._config.opener)
        elif trial_name is None:
            raise ConfigError("A service is asked by experiment and trial; give a trial_name.")
        else:
            self._answerer = _OverHttp(name, url, api_key or _first(found, _KEY_VARIABLES) or "")
        return self

    async def agenerate(
        self,
        prompt: str | Sequence[Mapping[str, Any]] | ModelRequest | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        gconfig: GenerationConfig | None = None,
        **sampling: Any,
    ) -> GeneratedText:
        """Answer ``prompt``: one question, or the messages of a conversation; or continue ``input_ids`` as they are.

        ``gconfig`` says how to sample, and ``sampling`` changes single settings of it (``temperature``, ``greedy``,
        ``max_new_tokens`` …). Cancelling aborts the generation.

        Raises:
            InvalidRequest: there is no prompt, or more than one; or a setting that makes no sense.
            ModelError: the weights cannot be read, or the service does not know the model.
            RequestError: the service refuses, or cannot be reached (``Unavailable``).
            ConfigError: ``initialize`` was not called.
        """
        if self._answerer is None:
            raise ConfigError("Call initialize(experiment_name=…, trial_name=…) before agenerate.")
        if isinstance(prompt, ModelRequest):
            input_ids, gconfig, prompt = prompt.input_ids.tolist(), gconfig or prompt.gconfig, None
        body = _body(prompt, input_ids) | _parameters(gconfig or GenerationConfig(), sampling)
        return await self._answerer.answer(body if self._user is None else body | {"user": self._user})

    async def aclose(self) -> None:
        """Close what ``agenerate`` opened, and wait for it; twice is fine."""
        if self._answerer is not None:
            await self._answerer.aclose()

    def destroy(self) -> None:
        """Close from code that cannot wait. What runs still ends by being aborted, soon after."""
        if self._answerer is not None:
            self._answerer.close_soon()

    async def __aenter__(self) -> Self:
        """Nothing is opened before the first question."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close."""
        with anyio.CancelScope(shield=True):
            await self.aclose()


# --------------------------------------------------------------------------------------------------- the request


def _first(environment: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


def _body(prompt: str | Sequence[Mapping[str, Any]] | None, input_ids: Sequence[int] | None) -> dict[str, Any]:
    if (prompt is None) == (input_ids is None):
        raise InvalidRequest("Give a prompt or input_ids, one of the two.", param="prompt")
    if input_ids is not None:
        return {"prompt": [int(token_id) for token_id in input_ids]}
    if isinstance(prompt, str):
        return {"messages": [{"role": "user", "content": prompt}]}
    return {"messages": [dict(message) for message in prompt or ()]}


def _parameters(gconfig: GenerationConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as OpenAI's protocol has them, with the names of other engines for what it lacks."""
    try:
        gconfig = evolve(gconfig, **changes)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"agenerate cannot sample so: {error}") from error
    sampling = asdict(gconfig.sampling, filter=lambda field, _: field.name in _SHARED)
    sampling |= {"stop": list(gconfig.stop), "stop_token_ids": list(gconfig.stop_token_ids)}
    return sampling | {"max_tokens": gconfig.max_new_tokens, "n": gconfig.n_samples}


_SHARED = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def _parse(body: Mapping[str, Any]) -> CompletionRequest:
    return parse_raw_request(body).request if "prompt" in body else parse_chat_request(body).request


# ------------------------------------------------------------------------------------------------------- at home


class _AtHome:
    """The embedded engine, opened by the first who asks and closed with its loop at the latest."""

    def __init__(self, model: TrainedModel, opener: ModelOpener) -> None:
        self._model = model
        self._opener = opener
        self._host: Host[ModelStack] | None = None
        self._loop: object = None
        self._opening = anyio.Lock()

    async def answer(self, body: Mapping[str, Any]) -> GeneratedText:
        request = _parse(body)
        stack = await self._open()
        opened = await stack.sessions.ask(OpenSession(task="inference"))
        try:
            credential = Credential(session=opened.session)
            (answer,) = await stack.sessions.ask(Complete(credential=credential, request=request))
        finally:
            with anyio.move_on_after(_FORGET_SECONDS, shield=True):
                await stack.sessions.tell(ForgetSession(session=opened.session))
        return _generated(answer, self._model.name)

    async def _open(self) -> ModelStack:
        if self._loop is not loop_identity():  # what an earlier loop had opened has ended with it
            self._host, self._loop, self._opening = None, loop_identity(), anyio.Lock()
        async with self._opening:
            if self._host is None or not self._host.is_open:
                host = Host(lambda: self._opener(self._model))
                await host.start()
                self._host = host
            return self._host.hosted

    async def aclose(self) -> None:
        host, self._host = self._host, None
        if host is not None and self._loop is loop_identity():
            await host.aclose()

    def close_soon(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.close_soon()


def _generated(answer: Answer, model: str) -> GeneratedText:
    completion = answer.completion
    return GeneratedText(
        text=answer.message.content or "",
        model=model,
        stop_reason=str(completion.finish),
        input_len=answer.usage.prompt_tokens,
        output_len=answer.usage.completion_tokens,
        output_tokens=tuple(completion.token_ids.tolist()),
        output_logprobs=tuple(completion.logprobs.tolist()),
    )


# ----------------------------------------------------------------------------------------------------- elsewhere


class _OverHttp:
    """A service that is running. It is asked once whether it knows the model: its policy answers to any other name."""

    def __init__(self, model: str, base_url: str, api_key: str) -> None:
        self._model = model
        self._base_url = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http: httpx.AsyncClient | None = None
        self._loop: object = None
        self._is_known = False

    async def answer(self, body: Mapping[str, Any]) -> GeneratedText:
        if not self._is_known:
            await self._check()
        route = "completions" if "prompt" in body else "chat/completions"
        found = await self._request("POST", route, json={"model": self._model, **body})
        choice, usage = found["choices"][0], found["usage"]
        text = choice["text"] if "prompt" in body else choice["message"]["content"]
        return GeneratedText(
            text=text or "",
            model=found["model"],
            stop_reason=choice["finish_reason"],
            input_len=usage["prompt_tokens"],
            output_len=usage["completion_tokens"],
        )

    async def _check(self) -> None:
        known = [model["id"] for model in (await self._request("GET", "models"))["data"]]
        if self._model not in known:
            raise ModelError(
                f"The service at {self._base_url} does not offer the model {self._model} to this key; it offers "
                f"{', '.join(known[:8])}."
            )
        self._is_known = True

    async def _request(self, method: str, route: str, **options: Any) -> Any:
        try:
            response = await self._client().request(
                method, f"{self._base_url}/{route}", headers=self._headers, **options
            )
        except httpx.HTTPError as error:
            raise Unavailable(f"{self._base_url} cannot be reached: {error}; check that the service runs.") from error
        if response.is_error:
            raise error_of(response)
        return response.json()

    def _client(self) -> httpx.AsyncClient:
        if self._http is None or self._loop is not loop_identity():
            self._http, self._loop = create_http_client(), loop_identity()
        return self._http

    async def aclose(self) -> None:
        http, self._http = self._http, None
        if http is not None and self._loop is loop_identity():
            await http.aclose()

    def close_soon(self) -> None:
        self._http = None
