"""The words of vLLM, from version 0.32 on: ids in and ids out at ``/inference/v1/generate``, and its routes for RL.

What was measured against a server of 0.32.0, and decided by it:

* ``/inference/v1/generate`` streams ids, log-probabilities by id and, with the finish, the spans of weight versions.
  ``/v1/completions`` streams ids, too, and names no versions: it is not used. The endpoint is there with
  ``--enable-scale-out``, pause and update with ``VLLM_SERVER_DEV_MODE=1``.
* With ``--logprobs-mode processed_logprobs``, and we insist on it, log-probabilities are those that were sampled from:
  after penalties, bias, grammar, temperature, top-k, top-p and min-p. The plain ones are known where none of these is
  asked for. By default, they would be the plain ones, and nobody knew what was sampled from.
* No ``seed`` is sent. Equal ones gave equal tokens, whatever ran beside them; but on a CPU a server dies of the first
  seeded prompt that it has to compute in parts, which many have to be after weights were loaded.
* An id outside the vocabulary is refused with a 400, or, in a stream, with an event after a 200; the server lives on.
  So is a prompt that leaves no room for a token. Unknown fields are ignored.
* The end token of the model ends nothing (``ignore_eos``): what ends a generation is in ``stop_token_ids``.
* Hanging up ends a request at once; ``/abort_requests`` wants the id as the server extends it (``ABORT_PREFIX``).
* Pausing takes about 30 ms (``keep``, ``abort``) in any state, and new requests wait in every mode. Health is answered
  throughout.
* ``reload_weights`` by ``/collective_rpc`` loads any directory of safetensors; it neither labels the weights nor drops
  what was computed with the old ones. ``reset_prefix_cache`` with ``reset_running_requests`` makes requests compute
  their keys and values anew; without it, log-probabilities are off by as much as 3.5. Nothing is sampled meanwhile, so
  all three are one update.
* A directory that cannot be loaded ends the whole server.

On a CPU, vLLM keeps a packed copy of each matrix, and forgets that of an output layer that is tied to the embeddings:
after an update, it would sample from new weights with an old head. Such a server is refused.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
from anyio import to_thread
from attrs import field, frozen

from areal_actors.domain import EngineRequest, FinishReason, PauseMode, Sampling, TopLogprob
from areal_actors.engines.lark import format_lark
from areal_actors.engines.servers.dialect import Delta, ServerFacts, VersionSpan
from areal_actors.engines.servers.http import (
    Answer,
    address_of,
    as_answer,
    ask,
    describe_failure,
    failure_of,
    get_document,
    open_events,
    parse_version,
    post_command,
)
from areal_actors.engines.servers.publishing import read_shapes
from areal_actors.errors import EngineError, ModelError, UnsupportedParameter

__all__ = ["ABORT_PREFIX", "OLDEST", "SESSION_HEADER", "VllmDialect"]

OLDEST = (0, 32, 0)
"""The first version that names weight versions by spans; of the one before, the answers do not tell."""

ABORT_PREFIX = "generate-tokens-"
"""What the server puts before the ids of our requests."""

SESSION_HEADER = "x-session-id"
"""What it keeps the requests of a session together by, where it runs several engines."""

MAX_TOP_LOGPROBS = 20
"""More must be allowed with ``--max-logprobs``."""

COLDEST = 0.01
"""What the server makes of temperatures between this and 0."""

TIED = "lm_head.weight"
"""What may be in one directory and not in the other: where it is tied, it is written or left out."""

LOGPROBS_MODE = "processed_logprobs"
GENERATE = "/inference/v1/generate"
UNKNOWN_LOGPROB = -9999.0

_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@frozen(kw_only=True)
class VllmDialect:
    """As ``ServerDialect``. ``added_tokens`` are texts and ids that grammars may need as tokens."""

    added_tokens: Mapping[str, int] = field(factory=dict)

    @property
    def name(self) -> str:
        """``vllm``."""
        return "vllm"

    async def describe(self, client: httpx.AsyncClient) -> ServerFacts:
        """Ask who it is; see ``ServerDialect.describe``. It must have been started as we need it."""
        version = str((await get_document(client, "/version", software="vLLM")).get("version", ""))
        if parse_version(version) < OLDEST:
            raise EngineError(
                f"{client.base_url} runs vLLM {version or 'of an unknown version'}; {'.'.join(map(str, OLDEST))} is "
                "the oldest that tells which weights sampled which token. Update it."
            )
        await _check_endpoints(client)
        label = (await get_document(client, "/weight_info", software="vLLM")).get("weight_version")
        info = await get_document(client, "/server_info?config_format=json", software="vLLM")
        try:
            facts = _facts(version, str(label), info["vllm_config"])
            mode, device = info["vllm_config"]["model_config"]["logprobs_mode"], _device(info["vllm_config"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{client.base_url} does not describe itself as vLLM does: {error!r}") from error
        _check_mode(client, mode)
        if device.startswith("cpu"):
            await _check_untied(client, facts.model)
        return facts

    async def is_ready(self, client: httpx.AsyncClient) -> bool:
        """Whether it answers, which it does while it is paused."""
        try:
            return not (await ask(client, "GET", "/health")).is_error
        except EngineError:
            return False

    def check(self, request: EngineRequest) -> None:
        """Refuse what the server would change by itself; see ``ServerDialect.check``."""
        sampling = request.sampling
        if 0 < sampling.temperature < COLDEST:
            raise UnsupportedParameter(
                f"vLLM samples at temperature 0, or at {COLDEST} and more, and {sampling.temperature} was asked for.",
                param="temperature",
            )
        if sampling.top_logprobs > MAX_TOP_LOGPROBS:
            raise UnsupportedParameter(
                f"vLLM tells {MAX_TOP_LOGPROBS} alternatives per token, and {sampling.top_logprobs} were asked for.",
                param="top_logprobs",
            )

    @asynccontextmanager
    async def generate(
        self, client: httpx.AsyncClient, request: EngineRequest, *, routing_key: str
    ) -> AsyncIterator[AsyncIterator[Delta]]:
        """Open a generation; see ``ServerDialect.generate``."""
        headers = {SESSION_HEADER: routing_key} if routing_key else None
        async with open_events(client, GENERATE, self._format(request), headers=headers) as events:
            if isinstance(events, Answer):
                raise failure_of(client, GENERATE, events)
            async with aclosing(_read(client, request, events)) as deltas:
                yield deltas

    def _format(self, request: EngineRequest) -> dict[str, Any]:
        return {
            "request_id": request.id,
            "token_ids": request.prompt.tolist(),
            "stream": True,
            "sampling_params": self._format_sampling(request),
        }

    def _format_sampling(self, request: EngineRequest) -> dict[str, Any]:
        sampling = request.sampling
        # A greedy request that is truncated beside others that sample would report the truncated distribution.
        cut = sampling if sampling.temperature else Sampling()
        body: dict[str, Any] = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": cut.top_p,
            "top_k": cut.top_k,
            "min_p": cut.min_p,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted({*request.stop_token_ids, *sampling.stop_token_ids}),
            # A grammar ends with the model's own end token, behind which nothing would hold what is sampled.
            "ignore_eos": request.grammar is None,
            "logprobs": min(sampling.top_logprobs + 1, MAX_TOP_LOGPROBS) if sampling.top_logprobs else 0,
            "detokenize": bool(sampling.stop),
        }
        if sampling.logit_bias:
            body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
        if request.grammar is not None:
            body["structured_outputs"] = {"grammar": format_lark(request.grammar, tokens=self.added_tokens)}
        return body

    async def abort(self, client: httpx.AsyncClient, request_id: str) -> None:
        """End a generation."""
        await post_command(client, "/abort_requests", {"request_ids": [ABORT_PREFIX + request_id]})

    async def pause(self, client: httpx.AsyncClient, mode: PauseMode) -> None:
        """Stop sampling. Keys and values are kept; they are dropped where the weights change."""
        await post_command(client, f"/pause?mode={mode.value}&clear_cache=false")

    async def resume(self, client: httpx.AsyncClient) -> None:
        """Go on sampling."""
        await post_command(client, "/resume")

    async def update_from_disk(self, client: httpx.AsyncClient, path: Path, *, version: str) -> None:
        """Load safetensors; see ``ServerDialect.update_from_disk``.

        The server would die of weights that it cannot load, so they are checked before it is told of them: against the
        files that it was started with, where these can be read from here.
        """
        await to_thread.run_sync(_check_shapes, path, await _find_model(client))
        await post_command(
            client, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        )
        await post_command(client, "/reset_prefix_cache?reset_running_requests=true")
        await post_command(client, "/update_weight_version", {"new_version": version})


# ------------------------------------------------------------------------------------------------ who it is


async def _check_endpoints(client: httpx.AsyncClient) -> None:
    """A request that says nothing is refused where there is somebody to refuse it."""
    wanted = {GENERATE: "--enable-scale-out", "/update_weight_version": "VLLM_SERVER_DEV_MODE=1 in its environment"}
    for path, advice in wanted.items():
        answer = await ask(client, "POST", path, {})
        if answer.status == httpx.codes.NOT_FOUND:
            raise EngineError(f"{client.base_url} does not know {path}; start vLLM with {advice}.")
        if not answer.is_refusal:
            raise EngineError(f"{describe_failure(client, path, answer)}; it was to refuse an empty request.")


def _check_mode(client: httpx.AsyncClient, mode: str) -> None:
    if mode != LOGPROBS_MODE:
        raise EngineError(
            f"{client.base_url} reports {mode}, which are not those of the distribution that it samples from; start "
            f"vLLM with --logprobs-mode {LOGPROBS_MODE}."
        )


async def _check_untied(client: httpx.AsyncClient, model: str) -> None:
    """See the module's last paragraph. A model that is not on this machine is not looked at."""
    try:
        config = json.loads(await anyio.Path(model, "config.json").read_text())
    except (OSError, ValueError):
        return
    if isinstance(config, Mapping) and config.get("tie_word_embeddings"):
        raise EngineError(
            f"{client.base_url} runs {model} on a CPU, and its output layer is tied to its embeddings: vLLM would keep "
            "the old output layer at every update. Train a model with tie_word_embeddings: false, or serve on a GPU."
        )


def _facts(version: str, label: str, config: Mapping[str, Any]) -> ServerFacts:
    model = config["model_config"]
    return ServerFacts(
        software=f"vllm {version}",
        model=str(model["model"]),
        weight_version=label,
        vocab_size=0,
        context_length=int(model["max_model_len"]),
        dtype=str(model["dtype"]).removeprefix("torch."),
        max_concurrent=int(config["scheduler_config"]["max_num_seqs"]),
        has_grammars=config["structured_outputs_config"]["backend"] == "guidance",
        logprobs_follow_truncation=True,
    )


def _device(config: Mapping[str, Any]) -> str:
    return str(config["device_config"]["device"])


def _check_shapes(directory: Path, model: Path) -> None:
    """Raise ``ModelError`` if the server, which began with ``model``, would die of the weights in ``directory``.

    Where the former cannot be read from here, such as one that has but a name on a hub, only the files are checked.
    """
    found = read_shapes(directory)
    try:
        wanted = read_shapes(model)
    except ModelError:
        return
    differing = {name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)} - {TIED}
    if differing:
        name = min(differing)
        raise ModelError(
            f"The weights in {directory} are not those of {model}, which the server was started with: {name} is "
            f"{found.get(name, 'missing')}, not {wanted.get(name, 'in the model')} ({len(differing)} differ). The old "
            "weights stay."
        )


# -------------------------------------------------------------------------------------------------- asking


async def _find_model(client: httpx.AsyncClient) -> Path:
    """What the server was started with: a directory, or a name that looks like one that is not there."""
    document = await get_document(client, "/v1/models", software="vLLM")
    try:
        return Path(document["data"][0]["root"])
    except (KeyError, TypeError, IndexError) as error:
        raise EngineError(f"{address_of(client, 'v1/models')} does not name its model: {error!r}") from error


# ------------------------------------------------------------------------------------------------- reading


async def _read(client: httpx.AsyncClient, request: EngineRequest, events: AsyncIterator[Any]) -> AsyncGenerator[Delta]:
    async for event in events:
        try:
            if event.get("error"):
                raise failure_of(client, GENERATE, as_answer(event))
            delta = _parse(request, event["choices"][0])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise EngineError(f"{client.base_url} streams what vLLM does not: {error!r}") from error
        yield delta
        if delta.finish is not None:
            # Read to its end, a stream leaves its connection to the next request.
            with suppress(EngineError):
                await anext(events, None)
            return
    raise EngineError(f"{client.base_url} ended its stream without a reason.")


def _parse(request: EngineRequest, choice: Mapping[str, Any]) -> Delta:
    ids = choice["token_ids"] or []
    content = (choice["logprobs"] or {}).get("content") or []
    if [entry["token_id"] for entry in content] != list(ids):
        raise ValueError(f"log-probabilities of other tokens than {ids}")
    logprobs = [_parse_logprob(entry) for entry in content]
    number = request.sampling.top_logprobs
    return Delta(
        token_ids=ids,
        logprobs=logprobs,
        raw_logprobs=logprobs if _is_plain(request) else [float("nan")] * len(ids),
        top_logprobs=tuple(_parse_top(entry, number) for entry in content) if number else (),
        finish=_FINISHES[choice["finish_reason"]] if choice["finish_reason"] else None,
        spans=tuple(
            VersionSpan(version=str(span["version"]), start=span["start"], end=span["end"])
            for span in choice.get("weight_versions") or ()
        ),
    )


def _parse_logprob(entry: Mapping[str, Any]) -> float:
    """The server says -9999 where it has none, or one that is not a number."""
    logprob = float(entry["logprob"])
    if logprob <= UNKNOWN_LOGPROB:
        raise ValueError(f"no log-probability of token {entry['token_id']}")
    return min(logprob, 0.0)


def _parse_top(entry: Mapping[str, Any], number: int) -> tuple[TopLogprob, ...]:
    """The most probable ones. In the list, the sampled token comes first, whatever its place is."""
    found = sorted(entry["top_logprobs"], key=lambda top: -top["logprob"])
    return tuple(TopLogprob(token_id=top["token_id"], logprob=top["logprob"]) for top in found[:number])


def _is_plain(request: EngineRequest) -> bool:
    """Whether what was sampled from is the plain softmax, or its maximum was taken."""
    sampling, neutral = request.sampling, Sampling()
    names = ["frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"]
    if sampling.temperature:
        names += ["temperature", "top_p", "top_k", "min_p"]
    return request.grammar is None and all(getattr(sampling, name) == getattr(neutral, name) for name in names)
