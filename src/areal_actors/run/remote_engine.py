"""Generation with a trained model, named by experiment and trial, from Python: ``RemoteSGLangEngine``.

Programs written for other systems import this class name. Requests are answered either by a running service of this
library over HTTP (``_OverHttp``), or by the embedded engine with weights from this machine's disk (``_Embedded``). Both
read the same request, in the format of OpenAI's API; one with a ``prompt`` is a plain completion.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import anyio
import httpx
from attrs import asdict, evolve, frozen

from areal_actors.client import create_http_client
from areal_actors.client.http import error_of
from areal_actors.domain import Credential, TrainedModel
from areal_actors.errors import ConfigError, InvalidRequest, ModelError, Unavailable
from areal_actors.lib.held_context import HeldContext
from areal_actors.lib.loops import loop_identity
from areal_actors.messages import Complete, ForgetSession, OpenSession
from areal_actors.models import Catalogue
from areal_actors.proxy.dialects.chat.answer import ChatDialect
from areal_actors.proxy.dialects.completions import CompletionsDialect
from areal_actors.run.inference import InferenceConfig, open_model
from areal_actors.workflows.engine import GenerationConfig, ModelRequest

T = TypeVar("T")

_URL_VARIABLES = ("AREAL_BASE_URL", "OPENAI_BASE_URL")
_KEY_VARIABLES = ("AREAL_API_KEY", "OPENAI_API_KEY")
_FORGET_SECONDS = 5.0


@frozen(kw_only=True)
class GeneratedText:
    """One generated answer.

    ``stop_reason`` is ``stop`` or ``length``; ``model`` is the ``experiment/trial`` that answered. ``output_tokens``
    and ``output_logprobs`` are the sampled ids and their log-probabilities if the weights are on this machine. A
    service returns text only, and they are ``None``.
    """

    text: str
    model: str
    stop_reason: str
    input_len: int
    output_len: int
    output_tokens: tuple[int, ...] | None = None
    output_logprobs: tuple[float, ...] | None = None


class RemoteSGLangEngine:
    """Generates with the weights that a run has trained. ``config`` are settings of the embedded engine, if it is used.

    ::

        engine = RemoteSGLangEngine()
        engine.initialize(experiment_name="my-model", trial_name="2025-10-23-run-1")
        response = await engine.agenerate(prompt="What is reinforcement learning?")
        print(response.text)
        await engine.aclose()

    The first ``agenerate`` opens the engine, in the event loop that awaits it, asyncio or trio. ``async with`` closes
    it at the end of a block; it is also closed when its event loop ends.
    """

    def __init__(self, config: InferenceConfig | None = None) -> None:
        self._config = config or InferenceConfig()
        self._answerer: _Embedded | _OverHttp | None = None
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
        """Select the model. Nothing is loaded yet.

        Args:
            experiment_name: the experiment.
            trial_name: its trial; optional for weights on disk if only one trial has weights.
            user: the user on whose behalf a service is asked.
            base_url: a running service, such as ``http://host:8000/v1``; defaults to ``AREAL_BASE_URL`` or
                ``OPENAI_BASE_URL`` of the environment. Without any, the weights are loaded from ``fileroot``.
            api_key: the key of a session of that service, or its admin key; defaults to ``AREAL_API_KEY`` or
                ``OPENAI_API_KEY``.
            fileroot: the directory of this machine's runs, ``runs`` by default. If given, the weights are loaded from
                it, even if the environment names a service.
            environment: replaces the environment of the process.

        Raises:
            ModelError: the weights do not exist; the message lists those that do. A service is not asked yet.
            ConfigError: both ``base_url`` and ``fileroot`` are given, or a service is named without a trial.
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
            self._answerer = _Embedded(model, self._config)
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
        """Answer ``prompt``, a question or the messages of a conversation, or continue the token ids ``input_ids``.

        ``gconfig`` holds the sampling settings, and ``sampling`` overrides single ones (``temperature``, ``greedy``,
        ``max_new_tokens`` …). Cancelling aborts the generation.

        Raises:
            InvalidRequest: there is no prompt, or more than one, or a setting is invalid.
            ModelError: the weights cannot be read, or the service does not know the model.
            RequestError: the service refuses the request, or cannot be reached (``Unavailable``).
            ConfigError: ``initialize`` was not called.
        """
        if self._answerer is None:
            raise ConfigError("Call initialize(experiment_name=…, trial_name=…) before agenerate.")
        if isinstance(prompt, ModelRequest):
            input_ids, gconfig, prompt = prompt.input_ids.tolist(), gconfig or prompt.gconfig, None
        if (prompt is None) == (input_ids is None):
            raise InvalidRequest("Give a prompt or input_ids, one of the two.", param="prompt")
        try:
            gconfig = evolve(gconfig or GenerationConfig(), **sampling)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"agenerate cannot sample so: {error}") from error
        body: dict[str, Any] = asdict(gconfig.sampling, filter=lambda field, _: field.name in _SHARED)
        body |= {"stop": list(gconfig.stop), "stop_token_ids": list(gconfig.stop_token_ids)}
        body |= {"max_tokens": gconfig.max_new_tokens, "n": gconfig.n_samples}
        if input_ids is not None:
            body["prompt"] = [int(token_id) for token_id in input_ids]
        elif isinstance(prompt, str):
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["messages"] = [dict(message) for message in prompt or ()]
        return await self._answerer.answer(body if self._user is None else body | {"user": self._user})

    async def aclose(self) -> None:
        """Close what ``agenerate`` opened, and wait for it. Idempotent."""
        if self._answerer is not None:
            await self._answerer.opened.aclose()

    def destroy(self) -> None:
        """Close without waiting, from synchronous code. Running generations are aborted soon after."""
        if self._answerer is not None:
            self._answerer.opened.close_soon()

    async def __aenter__(self) -> Self:
        """Return the engine; nothing is opened before the first request."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the engine. Shielded from cancellation."""
        with anyio.CancelScope(shield=True):
            await self.aclose()


def _first(environment: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


_SHARED = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""Sampling settings that OpenAI's API has, and extensions with the names that other engines use."""


# ---------------------------------------------------------------------------------------------------- who answers


class _PerLoop(Generic[T]):
    """A resource that the first use opens. It ends with its event loop; the next loop opens another."""

    def __init__(self, create: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._create = create
        self._held: HeldContext[T] | None = None
        self._loop: object = None
        self._opening = anyio.Lock()

    async def open(self) -> T:
        """Return the resource of this event loop, open."""
        if self._loop is not loop_identity():
            self._held, self._loop, self._opening = None, loop_identity(), anyio.Lock()
        async with self._opening:
            if self._held is None or not self._held.is_open:
                held = HeldContext(self._create)
                await held.start()
                self._held = held
            return self._held.value

    async def aclose(self) -> None:
        """Close it, and wait for that."""
        held, self._held = self._held, None
        if held is not None and self._loop is loop_identity():
            await held.aclose()

    def close_soon(self) -> None:
        """Close it without waiting."""
        held, self._held = self._held, None
        if held is not None:
            held.close_soon()


class _Embedded:
    """The embedded engine with the weights of a model."""

    def __init__(self, model: TrainedModel, config: InferenceConfig) -> None:
        self._model = model
        self.opened = _PerLoop(lambda: open_model(config, model))

    async def answer(self, body: Mapping[str, Any]) -> GeneratedText:
        dialect = CompletionsDialect() if "prompt" in body else ChatDialect()
        request = dialect.parse(body).request
        stack = await self.opened.open()
        session = await stack.sessions.ask(OpenSession(task="inference"))
        try:
            credential = Credential(session=session.session)
            (answer,) = await stack.sessions.ask(Complete(credential=credential, request=request))
        finally:
            # Shielded: a cancelled request must not leave its session behind.
            with anyio.move_on_after(_FORGET_SECONDS, shield=True):
                await stack.sessions.ask(ForgetSession(session=session.session))
        completion = answer.completion
        return GeneratedText(
            text=answer.message.content or "",
            model=self._model.name,
            stop_reason=str(completion.finish),
            input_len=answer.usage.prompt_tokens,
            output_len=answer.usage.completion_tokens,
            output_tokens=tuple(completion.token_ids.tolist()),
            output_logprobs=tuple(completion.logprobs.tolist()),
        )


class _OverHttp:
    """A running service.

    Its model list is checked once, before the first request: the service would answer an unknown name with its policy.
    """

    def __init__(self, model: str, base_url: str, api_key: str) -> None:
        self._model = model
        self._base_url = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._is_known = False
        self.opened = _PerLoop(create_http_client)

    async def answer(self, body: Mapping[str, Any]) -> GeneratedText:
        if not self._is_known:
            known = [model["id"] for model in (await self._request("GET", "models"))["data"]]
            if self._model not in known:
                to_whom = "with this key" if self._headers else "without a key (api_key)"
                raise ModelError(
                    f"The service at {self._base_url} does not offer the model {self._model} {to_whom}; it offers "
                    f"{', '.join(known[:8])}."
                )
            self._is_known = True
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

    async def _request(self, method: str, route: str, **options: Any) -> Any:
        http = await self.opened.open()
        try:
            response = await http.request(method, f"{self._base_url}/{route}", headers=self._headers, **options)
        except httpx.HTTPError as error:
            raise Unavailable(f"{self._base_url} cannot be reached: {error}; check that the service runs.") from error
        if response.is_error:
            raise error_of(response)
        return response.json()
