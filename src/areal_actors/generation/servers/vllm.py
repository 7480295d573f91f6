"""The dialect of vLLM, from version 0.32 on: ``/inference/v1/generate``, ids in and ids out, and its routes for RL.

These facts were measured against a server of version 0.32.0:

* ``/inference/v1/generate`` streams ids, log-probabilities by id and, with the finish, the spans of weight versions.
  ``/v1/completions`` streams ids, too, but reports no versions and is not used. The endpoint requires
  ``--enable-scale-out``; pause and update require ``VLLM_SERVER_DEV_MODE=1``.
* With ``--logprobs-mode processed_logprobs``, which we require, log-probabilities are those of the distribution that
  was sampled from: after penalties, bias, grammar, temperature, top-k, top-p and min-p. The raw ones are known if none
  of these is requested. In the default mode, they would be the raw ones, and those of the sampled distribution would be
  unknown.
* An id outside the vocabulary is rejected with a 400, or, in a stream, with an event after a 200; the server keeps
  running. So is a prompt that leaves no room for a token. Unknown fields are ignored.
* Closing the connection ends a request at once; ``/abort_requests`` takes the id with the server's prefix
  (``ABORT_PREFIX``).
* A directory that cannot be loaded crashes the whole server.

On a CPU, vLLM keeps a packed copy of each matrix, and does not update that of an output layer that is tied to the
embeddings: after an update, it samples from new weights with an old output layer, and the trainer's capture gate fails.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from anyio import to_thread
from attrs import field, frozen

from areal_actors.domain import EngineRequest, FinishReason, PauseMode, Sampling, TopLogprob
from areal_actors.errors import EngineError, ModelError, UnsupportedParameter
from areal_actors.generation.lark import format_lark
from areal_actors.generation.servers.config import AdapterSlots
from areal_actors.generation.servers.dialect import (
    LOGITS_SETTINGS,
    Delta,
    ServerFacts,
    ServerKind,
    VersionSpan,
    are_defaults,
    open_deltas,
)
from areal_actors.generation.servers.http import (
    address_of,
    ask,
    describe_failure,
    get_document,
    parse_version,
    post_command,
)
from areal_actors.generation.servers.publishing import read_shapes

OLDEST = (0, 32, 0)
"""The first version that reports spans of weight versions."""

ABORT_PREFIX = "generate-tokens-"
"""The prefix that the server adds to the ids of our requests."""

SESSION_HEADER = "x-session-id"
"""The header by which a server that runs several engines keeps the requests of a session together."""

MAX_TOP_LOGPROBS = 20
"""The server's default limit; ``--max-logprobs`` raises it."""

COLDEST = 0.01
"""The server raises temperatures between 0 and this value to this value."""

TIED = "lm_head.weight"
"""A tensor that may be missing from a checkpoint: if it is tied to the embeddings, it may be written or left out."""

LOGPROBS_MODE = "processed_logprobs"
GENERATE = "/inference/v1/generate"
UNKNOWN_LOGPROB = -9999.0
"""Sent for a log-probability that is missing or not a number."""

_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@frozen(kw_only=True)
class VllmDialect:
    """Implements ``ServerDialect`` for vLLM.

    ``added_tokens`` maps texts of added tokens to ids, for grammars. Answers that no client streams arrive in events of
    ``stream_interval`` tokens; a server that does not know this parameter ignores it.
    """

    added_tokens: Mapping[str, int] = field(factory=dict)
    stream_interval: int = 1
    adapter_root = "/v1"

    @property
    def name(self) -> str:
        """Return ``vllm``."""
        return "vllm"

    async def describe(self, client: httpx.AsyncClient) -> ServerFacts:
        """Return the server's properties; see ``ServerDialect.describe``.

        Raises ``EngineError`` as well if the server was started without the options that we require.
        """
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
            config = info["vllm_config"]
            model = config["model_config"]
            mode = model["logprobs_mode"]
            facts = ServerFacts(
                software=f"vllm {version}",
                model=str(model["model"]),
                weight_version=str(label),
                vocab_size=0,
                context_length=int(model["max_model_len"]),
                dtype=str(model["dtype"]).removeprefix("torch."),
                max_concurrent=int(config["scheduler_config"]["max_num_seqs"]),
                has_grammars=config["structured_outputs_config"]["backend"] == "guidance",
                logprobs_follow_truncation=True,
                max_adapter_rank=int((config.get("lora_config") or {}).get("max_lora_rank") or 0),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{client.base_url} does not describe itself as vLLM does: {error!r}") from error
        if mode != LOGPROBS_MODE:
            raise EngineError(
                f"{client.base_url} reports {mode}, which are not those of the distribution that it samples from; "
                f"start vLLM with --logprobs-mode {LOGPROBS_MODE}."
            )
        return facts

    async def is_ready(self, client: httpx.AsyncClient) -> bool:
        """Return whether the server answers; it does so while it is paused."""
        try:
            return not (await ask(client, "GET", "/health")).is_error
        except EngineError:
            return False

    def check(self, request: EngineRequest) -> None:
        """Reject parameters that the server would change silently; see ``ServerDialect.check``."""
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

    def generate(
        self, client: httpx.AsyncClient, request: EngineRequest, *, routing_key: str, adapter: str | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
        """Open a generation; see ``ServerDialect.generate``."""
        headers = {SESSION_HEADER: routing_key} if routing_key else None
        body = self._format(request) | ({} if adapter is None else {"model": adapter})
        # The sampled distribution is the raw softmax, or its maximum was taken: a greedy request is sent without
        # truncation.
        names = (*LOGITS_SETTINGS, "temperature", "top_p", "top_k", "min_p")
        is_plain = are_defaults(request, names if request.sampling.temperature else LOGITS_SETTINGS)
        parse = partial(_parse, request, is_plain=is_plain and request.grammar is None)
        return open_deltas(client, GENERATE, body, parse, headers=headers, software="vLLM")

    def _format(self, request: EngineRequest) -> dict[str, Any]:
        sampling = request.sampling
        # A greedy request with truncation, batched with others that sample, would report the truncated distribution.
        cut = sampling if sampling.temperature else Sampling()
        parameters: dict[str, Any] = {
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
            # The model's end token ends nothing: all ids that end a generation are in ``stop_token_ids``. But a grammar
            # ends with it, and sampling would be unconstrained afterwards.
            "ignore_eos": request.grammar is None,
            "logprobs": min(sampling.top_logprobs + 1, MAX_TOP_LOGPROBS) if sampling.top_logprobs else 0,
            "detokenize": bool(sampling.stop),
        }
        if not request.is_streamed:
            parameters["stream_interval"] = self.stream_interval
        if sampling.logit_bias:
            parameters["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
        if request.grammar is not None:
            parameters["structured_outputs"] = {"grammar": format_lark(request.grammar, tokens=self.added_tokens)}
        # No ``seed``: equal seeds gave equal tokens, whatever ran at the same time, but on a CPU a server crashes on
        # the first seeded prompt that it has to compute in parts, and many are after weights were loaded.
        return {
            "request_id": request.id,
            "token_ids": request.prompt.tolist(),
            "stream": True,
            "sampling_params": parameters,
        }

    async def abort(self, client: httpx.AsyncClient, request_id: str) -> None:
        """End a generation; see ``ServerDialect.abort``."""
        await post_command(client, "/abort_requests", {"request_ids": [ABORT_PREFIX + request_id]})

    async def pause(self, client: httpx.AsyncClient, mode: PauseMode) -> None:
        """Stop sampling. Keys and values are kept; they are dropped when the weights change."""
        # It takes about 30 ms (``keep``, ``abort``) in any state, and new requests wait in every mode.
        await post_command(client, f"/pause?mode={mode.value}&clear_cache=false")

    async def resume(self, client: httpx.AsyncClient) -> None:
        """Continue sampling."""
        await post_command(client, "/resume")

    async def update_from_disk(self, client: httpx.AsyncClient, path: Path, *, version: str) -> None:
        """Load safetensors; see ``ServerDialect.update_from_disk``.

        The server crashes on weights that it cannot load, so they are checked first against the files with which it was
        started, if these can be read from here.
        """
        document = await get_document(client, "/v1/models", software="vLLM")
        try:
            # A directory, or a name on a hub, which looks like a missing one.
            model = Path(document["data"][0]["root"])
        except (KeyError, TypeError, IndexError) as error:
            raise EngineError(f"{address_of(client, 'v1/models')} does not name its model: {error!r}") from error
        await to_thread.run_sync(_check_shapes, path, model)
        # The server is paused, and samples nothing meanwhile: all three commands form one update. The first loads any
        # directory of safetensors; it neither labels the weights nor drops keys and values of the old ones.
        await post_command(
            client, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        )
        # Running requests compute their keys and values again. Without this, log-probabilities are off by up to 3.5.
        await post_command(client, "/reset_prefix_cache?reset_running_requests=true")
        await post_command(client, "/update_weight_version", {"new_version": version})


# ------------------------------------------------------------------------------------------------ who it is


async def _check_endpoints(client: httpx.AsyncClient) -> None:
    """Check that the server was started with the endpoints that we need: each must reject an empty request."""
    wanted = {GENERATE: "--enable-scale-out", "/update_weight_version": "VLLM_SERVER_DEV_MODE=1 in its environment"}
    for path, advice in wanted.items():
        answer = await ask(client, "POST", path, {})
        if answer.status == httpx.codes.NOT_FOUND:
            raise EngineError(f"{client.base_url} does not know {path}; start vLLM with {advice}.")
        if not answer.is_refusal:
            raise EngineError(f"{describe_failure(client, path, answer)}; it was to refuse an empty request.")


def _check_shapes(directory: Path, model: Path) -> None:
    """Raise ``ModelError`` if the server would crash on the weights in ``directory``.

    The server was started with ``model``. If that cannot be read from here, for example because it is a name on a hub,
    only the files are checked.
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


# ------------------------------------------------------------------------------------------------- reading


def _parse(request: EngineRequest, event: Mapping[str, Any], *, is_plain: bool) -> Delta:
    choice = event["choices"][0]
    ids = choice["token_ids"] or []
    content = (choice["logprobs"] or {}).get("content") or []
    if [entry["token_id"] for entry in content] != list(ids):
        raise ValueError(f"log-probabilities of other tokens than {ids}")
    missing = [entry["token_id"] for entry in content if float(entry["logprob"]) <= UNKNOWN_LOGPROB]
    if missing:
        raise ValueError(f"no log-probability of token {missing[0]}")
    logprobs = [min(float(entry["logprob"]), 0.0) for entry in content]
    number = request.sampling.top_logprobs
    # vLLM puts the sampled token first, whatever its rank.
    ranked = [sorted(entry["top_logprobs"], key=lambda top: -top["logprob"]) for entry in content] if number else []
    return Delta(
        token_ids=ids,
        logprobs=logprobs,
        raw_logprobs=logprobs if is_plain else [float("nan")] * len(ids),
        top_logprobs=tuple(
            tuple(TopLogprob(token_id=top["token_id"], logprob=top["logprob"]) for top in tops[:number])
            for tops in ranked
        ),
        finish=_FINISHES[choice["finish_reason"]] if choice["finish_reason"] else None,
        spans=tuple(
            VersionSpan(version=str(span["version"]), start=span["start"], end=span["end"])
            for span in choice.get("weight_versions") or ()
        ),
    )


# ------------------------------------------------------------------------------------------------------ starting

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of adapters for which vLLM can be started."""


def _describe_place(model: Path, host: str, port: int) -> tuple[str, ...]:
    place = ("--model", str(model), "--host", host, "--port", str(port))
    return (*place, "--enable-scale-out", "--logprobs-mode", LOGPROBS_MODE)


def _describe_adapters(slots: AdapterSlots) -> tuple[str, ...]:
    rank = next((rank for rank in _RANKS if rank >= slots.rank), slots.rank)
    return ("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2", "--max-cpu-loras", "4")


KIND = ServerKind(
    create=VllmDialect,
    oldest=OLDEST,
    module="vllm.entrypoints.openai.api_server",
    # The routes for pausing and updating exist only in development mode, those for adapters only with the last one.
    environment={
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    },
    describe_place=_describe_place,
    describe_adapters=_describe_adapters,
)
