"""The dialect of SGLang: its native HTTP interface, from version 0.5.21 on.

* ``/generate`` takes ids and streams ids. Log-probabilities are those of ``softmax(logits / T)`` before top-p, top-k
  and min-p; the raw ones are known if only truncation is requested at T = 1.
* Versions are reported at the end, as spans, and so are the experts of all tokens, if they are asked for.
* Weights are read from disk.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
from attrs import define, field, frozen

from areal_actors.domain import EngineRequest, FinishReason, PauseMode, TopLogprob
from areal_actors.errors import EngineError, ModelError
from areal_actors.generation.lark import format_lark
from areal_actors.generation.servers.config import AdapterSlots
from areal_actors.generation.servers.dialect import (
    LOGITS_SETTINGS,
    Delta,
    RoutedLayers,
    ServerFacts,
    ServerKind,
    VersionSpan,
    are_defaults,
    open_deltas,
)
from areal_actors.generation.servers.http import (
    Answer,
    ask,
    describe_failure,
    failure_of,
    get_document,
    parse_version,
    post_command,
)

OLDEST = (0, 5, 21)
"""The first version that reports version spans, and whose health can be checked while it is paused."""

_GENERATE = "/generate"

ROUTING_HEADER = "x-smg-routing-key"
"""The header by which SGLang's gateway keeps the requests of a session together."""

# ``retract`` drops keys and values, which are computed again: nothing of the old weights remains in the cache.
_PAUSES = {PauseMode.KEEP: "retract", PauseMode.WAIT: "retract", PauseMode.ABORT: "abort"}


@frozen(kw_only=True)
class SGLangDialect:
    """Implements ``ServerDialect`` for SGLang.

    ``added_tokens`` maps texts of added tokens to ids, for grammars. Answers that no client streams arrive in events of
    ``stream_interval`` tokens. With ``routed_layers``, answers have the experts of each token.
    """

    added_tokens: Mapping[str, int] = field(factory=dict)
    stream_interval: int = 1
    routed_layers: RoutedLayers | None = None
    adapter_root = ""

    @property
    def name(self) -> str:
        """Return ``sglang``."""
        return "sglang"

    async def describe(self, client: httpx.AsyncClient) -> ServerFacts:
        """Return the server's properties; see ``ServerDialect.describe``."""
        info, model = (
            await get_document(client, "/server_info", software="SGLang"),
            await get_document(client, "/model_info", software="SGLang"),
        )
        models = await get_document(client, "/v1/models", software="SGLang")
        version = str(info.get("version", ""))
        if parse_version(version) < OLDEST:
            raise EngineError(
                f"{client.base_url} runs SGLang {version or 'of an unknown version'}; "
                f"{'.'.join(map(str, OLDEST))} is the oldest that tells which weights sampled which token. Update it."
            )
        if self.routed_layers is not None and not info.get("enable_return_routed_experts"):
            raise EngineError(
                f"{client.base_url} does not record experts, which trainer.router_replay needs: start SGLang with "
                "--enable-return-routed-experts."
            )
        try:
            # The limit on prompts may be below the model's context length, because the server reserves some room.
            lengths = [info.get("max_req_input_len"), models["data"][0].get("max_model_len")]
            state = (info.get("internal_states") or [{}])[0]
            concurrent = state.get("effective_max_running_requests_per_dp") or info.get("max_running_requests") or 256
            return ServerFacts(
                software=f"sglang {version}",
                model=str(Path(model["model_path"])),
                weight_version=str(model["weight_version"]),
                vocab_size=0,
                context_length=min(int(length) for length in lengths if length),
                dtype=str(info["dtype"]),
                max_concurrent=int(concurrent) * int(info.get("dp_size") or 1),
                has_grammars=info.get("grammar_backend") == "llguidance",
                max_adapter_rank=int(info.get("max_lora_rank") or 0) if info.get("enable_lora") else 0,
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"{client.base_url} does not describe itself as SGLang does: {error!r}") from error

    async def is_ready(self, client: httpx.AsyncClient) -> bool:
        """Return whether the server answers."""
        try:
            # Not /ready or /health: while the server is paused, they answer with an error, or not at all.
            return not (await ask(client, "GET", "/model_info")).is_error
        except EngineError:
            return False

    def check(self, request: EngineRequest) -> None:
        """Accept every request: SGLang ignores no parameter that we send."""

    def generate(
        self, client: httpx.AsyncClient, request: EngineRequest, *, routing_key: str, adapter: str | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
        """Open a generation; see ``ServerDialect.generate``."""
        headers = {ROUTING_HEADER: routing_key} if routing_key else None
        body = self._format(request) | ({} if adapter is None else {"lora_path": adapter})
        parse = _EventParser(client, request, self.routed_layers)
        return open_deltas(client, _GENERATE, body, parse, headers=headers, software="SGLang")

    def _format(self, request: EngineRequest) -> dict[str, Any]:
        sampling = request.sampling
        stop_ids = sorted({*request.stop_token_ids, *sampling.stop_token_ids})
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            "stop_token_ids": stop_ids,
            # It would disable our own stop tokens as well, so it is sent only if there are none. Otherwise the server
            # also stops at its model's end token, and the engine continues from there if that was not requested.
            "ignore_eos": not stop_ids,
            "skip_special_tokens": False,
        }
        if not request.is_streamed:
            parameters["stream_interval"] = self.stream_interval
        if sampling.logit_bias:
            parameters["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
        if request.grammar is not None:
            parameters["ebnf"] = format_lark(request.grammar, tokens=self.added_tokens)
        recording = {} if self.routed_layers is None else {"return_routed_experts": True}
        return recording | {
            "rid": request.id,
            "input_ids": request.prompt.tolist(),
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": sampling.top_logprobs,
            "sampling_params": parameters,
        }

    async def abort(self, client: httpx.AsyncClient, request_id: str) -> None:
        """End a generation; see ``ServerDialect.abort``."""
        await post_command(client, "/abort_request", {"rid": request_id})

    async def pause(self, client: httpx.AsyncClient, mode: PauseMode) -> None:
        """Stop sampling. For ``WAIT``, the engine has waited until nothing runs."""
        await post_command(client, "/pause_generation", {"mode": _PAUSES[mode]})

    async def resume(self, client: httpx.AsyncClient) -> None:
        """Continue sampling."""
        await post_command(client, "/continue_generation", {})

    async def update_from_disk(self, client: httpx.AsyncClient, path: Path, *, version: str) -> None:
        """Load safetensors; see ``ServerDialect.update_from_disk``."""
        body = {"model_path": str(path), "weight_version": version, "flush_cache": True}
        answer = await ask(client, "POST", "/update_weights_from_disk", body)
        succeeded = isinstance(answer.document, Mapping) and answer.document.get("success")
        if succeeded and not answer.is_error:
            return
        if answer.is_refusal or (isinstance(answer.document, Mapping) and not answer.is_error):
            raise ModelError(f"{client.base_url} refuses the weights in {path}: {answer.said} The old weights stay.")
        raise EngineError(describe_failure(client, "/update_weights_from_disk", answer))


# ---------------------------------------------------------------------------------------------------- reading


@define
class _EventParser:
    """Returns the new tokens of each event, whether events are cumulative, as by default, or not."""

    client: httpx.AsyncClient
    request: EngineRequest
    routed_layers: RoutedLayers | None
    is_plain: bool = field(init=False)
    """Whether the reported distribution is the raw one, so that its log-probabilities are raw, too."""
    num_seen: int = 0

    def __attrs_post_init__(self) -> None:
        # SGLang reports the softmax at the request's temperature, before truncation.
        is_plain = self.request.sampling.temperature in (0.0, 1.0) and self.request.grammar is None
        self.is_plain = is_plain and are_defaults(self.request, LOGITS_SETTINGS)

    def __call__(self, event: Mapping[str, Any]) -> Delta:
        meta = event["meta_info"]
        reason = meta["finish_reason"]
        if reason is not None and reason["type"] == "abort" and reason.get("status_code"):
            answer = Answer(int(reason["status_code"]), json.dumps(reason), reason)
            raise failure_of(self.client, _GENERATE, answer)
        num_new = int(meta.get("completion_tokens", self.num_seen)) - self.num_seen
        ids = _last(event["output_ids"], num_new)
        found = _last(meta.get("output_token_logprobs") or (), num_new)
        if [entry[1] for entry in found] != list(ids):
            raise ValueError(f"log-probabilities of other tokens than {ids}")
        # Rounding may make log-probabilities slightly positive.
        logprobs = [min(entry[0], 0.0) for entry in found]
        tops = _last(meta.get("output_top_logprobs") or (), num_new) if self.request.sampling.top_logprobs else ()
        self.num_seen += num_new
        experts = None
        # Aborted generations have none. Those of the attempt that continues one cover its tokens, too.
        if self.routed_layers is not None and reason is not None and reason["type"] != FinishReason.ABORT:
            # The last token was sampled, and not computed.
            num_computed = len(self.request.prompt) + self.num_seen - 1
            experts = self.routed_layers.decode(meta["routed_experts"], num_tokens=num_computed)
        return Delta(
            token_ids=ids,
            logprobs=logprobs,
            raw_logprobs=logprobs if self.is_plain else [float("nan")] * num_new,
            top_logprobs=tuple(tuple(TopLogprob(token_id=e[1], logprob=e[0]) for e in top or ()) for top in tops),
            finish=None if reason is None else FinishReason(reason["type"]),
            spans=tuple(
                VersionSpan(version=str(span["version"]), start=span["start"], end=span["end"])
                for span in meta.get("weight_versions") or ()
            ),
            num_cached_tokens=int(meta.get("cached_tokens") or 0),
            server_version=str(meta["weight_version"]),
            routed_experts=experts,
        )


def _last(values: Sequence[Any], number: int) -> Sequence[Any]:
    if not 0 <= number <= len(values):
        raise ValueError(f"{number} new tokens, and {len(values)} in the event")
    return values[len(values) - number :]


# ------------------------------------------------------------------------------------------------------ starting


def _describe_place(model: Path, host: str, port: int) -> tuple[str, ...]:
    return ("--model-path", str(model), "--host", host, "--port", str(port))


def _describe_adapters(slots: AdapterSlots) -> tuple[str, ...]:
    # Room for the current version, the one before, one that a request with a grammar still uses, and the base.
    return (
        *("--enable-lora", "--max-lora-rank", str(slots.rank), "--max-loras-per-batch", "4"),
        *("--lora-target-modules", *(slots.modules or ("all",))),
    )


KIND = ServerKind(
    create=SGLangDialect,
    oldest=OLDEST,
    module="sglang.launch_server",
    # Otherwise each event repeats all earlier tokens of its answer.
    arguments=("--incremental-streaming-output",),
    recording=("--enable-return-routed-experts",),
    describe_place=_describe_place,
    describe_adapters=_describe_adapters,
)
