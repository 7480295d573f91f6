"""vLLM's words: what is sent, what is read, and what is refused before it is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from attrs import evolve
from safetensors.numpy import save_file

from areal_actors.domain import EngineRequest, Exactly, FinishReason, PauseMode, SampleKey, Sampling
from areal_actors.errors import EngineError, InvalidRequest, ModelError, UnsupportedParameter
from areal_actors.generation.servers.config import Backend, ServerConfig
from areal_actors.generation.servers.dialect import Delta, VersionSpan
from areal_actors.generation.servers.launching import find_kind, format_command
from areal_actors.generation.servers.vllm import VllmDialect
from areal_actors.testing.engines import EchoEngine
from areal_actors_testing.vllm_server import open_vllm_server


def create_request(**sampling: Any) -> EngineRequest:
    return EngineRequest(id="one", prompt=[5, 6], sampling=Sampling(**sampling), key=SampleKey(seed=1, path=("a", 2)))


@pytest.fixture
def anyio_backend() -> str:
    """Use one event loop: a dialect does not depend on it."""
    return "asyncio"


def event(*ids: int, finish: str | None = None, **changes: Any) -> str:
    """A line of a stream, as a real server writes it."""
    choice = {
        "index": 0,
        "finish_reason": finish,
        "token_ids": list(ids),
        "weight_versions": [{"version": "7", "start": 0, "end": len(ids)}] if finish else None,
        "logprobs": {"content": [{"token_id": i, "logprob": -0.5, "rank": 2, "top_logprobs": []} for i in ids]},
    } | changes
    return f"data: {json.dumps({'request_id': 'generate-tokens-one', 'choices': [choice]})}\n\n"


@pytest.fixture
def read() -> Callable:
    """Reads all deltas of a stream that a server answers with; ``sent`` is what it was asked."""

    async def run(text: str, request: EngineRequest | None = None, *, status: int = 200) -> list[Delta]:
        def answer(asked: httpx.Request) -> httpx.Response:
            run.sent = json.loads(asked.content)
            run.headers = asked.headers
            return httpx.Response(status, text=text)

        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            dialect = VllmDialect(added_tokens={"<tool_call>": 9})
            request = request or create_request()
            async with dialect.generate(client, request, routing_key="session-1") as deltas:
                return [delta async for delta in deltas]

    return run


@pytest.mark.anyio
async def test_stream_becomes_deltas(read) -> None:
    """Ids and log-probabilities as they come; spans and the finish at the end."""
    first, last = await read(": keep-alive\n\n" + event(3, 4) + event(5, finish="stop") + "data: [DONE]\n\n")

    assert ([3, 4], None) == (first.token_ids.tolist(), first.finish)
    assert ([5], FinishReason.STOP) == (last.token_ids.tolist(), last.finish)
    assert (VersionSpan(version="7", start=0, end=1),) == last.spans
    assert [-0.5, -0.5] == first.logprobs.tolist() == first.raw_logprobs.tolist()
    assert "session-1" == read.headers["x-session-id"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("data: [DONE]\n\n", "without a reason"),
        (event(3), "cut its stream"),
        (event(3, finish="repetition"), "streams what vLLM does not"),
        (event(3, logprobs=None), "other tokens"),
        (event(3, logprobs={"content": [{"token_id": 4, "logprob": -1}]}), "other tokens"),
        (event(3, logprobs={"content": [{"token_id": 3, "logprob": -9999.0}]}), "no log-probability of token 3"),
        ("data: []\n\n", "streams what vLLM does not"),
        ("data: {]\n\n", "is not JSON"),
        ('data: {"error": {"message": "EngineCore", "code": 500}}\n\n', "EngineCore"),
    ],
)
async def test_malformed_events_are_errors(read, text: str, error: str) -> None:
    """Whatever is not what vLLM streams says so, and never becomes tokens of a finished answer."""
    with pytest.raises(EngineError, match=error):
        await read(text)


@pytest.mark.anyio
async def test_refusals_are_errors_of_the_request(read) -> None:
    """With a status, or as an event after a 200, as the real server does in streams."""
    document = '{"error": {"message": "Token id 384 is out of vocabulary", "code": 400}}'
    with pytest.raises(InvalidRequest, match="out of vocabulary"):
        await read(f"data: {document}\n\ndata: [DONE]\n\n")
    with pytest.raises(InvalidRequest, match="out of vocabulary"):
        await read(document, status=400)
    with pytest.raises(EngineError, match="404"):
        await read("nothing here", status=404)


@pytest.mark.anyio
async def test_every_setting_is_sent(read) -> None:
    """None is left to the defaults of the server or of its model; but no seed, of which it may die."""
    request = create_request(
        temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, stop=("x",), logit_bias=((7, 1.5),), top_logprobs=2
    )
    await read(event(3, finish="length") + "data: [DONE]\n\n", evolve(request, stop_token_ids=(2,)))

    assert {
        "max_tokens": 512,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": ["x"],
        "stop_token_ids": [2],
        "ignore_eos": True,
        "logprobs": 3,
        "detokenize": True,
        "logit_bias": {"7": 1.5},
    } == read.sent["sampling_params"]


@pytest.mark.anyio
async def test_grammar_is_sent_with_its_tokens(read) -> None:
    """As the text that vLLM's guidance backend reads; the model's end token ends it."""
    request = evolve(create_request(), grammar=Exactly(text="<tool_call>a"), stop_token_ids=(2,))
    (delta,) = await read(event(9, finish="stop") + "data: [DONE]\n\n", request)

    assert "<[9]>" in read.sent["sampling_params"]["structured_outputs"]["grammar"]
    assert not read.sent["sampling_params"]["ignore_eos"]
    assert np.isnan(delta.raw_logprobs).all()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("sampling", "is_known"),
    [
        ({}, True),
        ({"temperature": 0.0, "top_p": 0.5}, True),
        ({"temperature": 0.7}, False),
        ({"top_p": 0.9}, False),
        ({"top_k": 5}, False),
        ({"min_p": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"logit_bias": ((3, 1.0),)}, False),
    ],
)
async def test_raw_logprobs_are_known_for_plain_requests(read, sampling, *, is_known: bool) -> None:
    """Elsewhere they are NaN: what the server reports is another distribution."""
    (delta,) = await read(event(3, finish="length") + "data: [DONE]\n\n", create_request(**sampling))

    assert is_known == bool(np.isfinite(delta.raw_logprobs).all())
    assert np.isfinite(delta.logprobs).all()


@pytest.mark.anyio
async def test_alternatives_are_the_most_probable(read) -> None:
    """The server lists the sampled token first, whatever its place is; it only counts where it belongs."""
    tops = [{"token_id": 3, "logprob": -4.0}, {"token_id": 8, "logprob": -1.0}, {"token_id": 9, "logprob": -2.0}]
    content = [{"token_id": 3, "logprob": -4.0, "top_logprobs": tops}]
    text = event(3, finish="length", logprobs={"content": content}) + "data: [DONE]\n\n"
    (delta,) = await read(text, create_request(top_logprobs=2))

    assert [8, 9] == [top.token_id for top in delta.top_logprobs[0]]


def test_parameters_that_vllm_would_change_are_refused() -> None:
    """Temperatures that it rounds up, and alternatives that it does not give."""
    VllmDialect().check(create_request(temperature=0.01, top_logprobs=20))
    for sampling in ({"temperature": 0.001}, {"top_logprobs": 21}):
        with pytest.raises(UnsupportedParameter, match="vLLM"):
            VllmDialect().check(create_request(**sampling))


@asynccontextmanager
async def connect(model: Path, **changes: Any):
    """A client of a fake server whose facts are as they should be, but for ``changes``."""
    async with open_vllm_server(EchoEngine(vocab_size=96, context_length=256), model=model) as server:
        for name, value in changes.items():
            setattr(server, name, value)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            yield client, server


@pytest.mark.anyio
async def test_server_describes_itself(tmp_path) -> None:
    """Version, length and label are the server's own words."""
    async with connect(tmp_path) as (client, _):
        facts = await VllmDialect().describe(client)
        is_ready = await VllmDialect().is_ready(client)
    async with httpx.AsyncClient(base_url="http://127.0.0.1:1") as client:
        is_anybody_there = await VllmDialect().is_ready(client)

    assert ("vllm 0.32.0", 256, "default", False) == (
        facts.software,
        facts.context_length,
        facts.weight_version,
        facts.has_grammars,
    )
    assert (True, False) == (is_ready, is_anybody_there)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"version": "0.31.0"}, "0.32.0 is the oldest"),
        ({"version": "dev"}, "0.32.0 is the oldest"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
    ],
)
async def test_unfit_server_is_refused(tmp_path, changes, advice: str) -> None:
    """With what to do about it."""
    async with connect(tmp_path, **changes) as (client, _):
        with pytest.raises(EngineError, match=advice):
            await VllmDialect().describe(client)


@pytest.mark.anyio
async def test_weights_are_checked_before_they_are_sent(tmp_path) -> None:
    """The real one would die of them."""
    for name, tensors in {
        "model": {"a": (2, 3), "b": (4,)},
        "same": {"a": (2, 3), "b": (4,)},
        "less": {"a": (2, 3)},
        "more": {"a": (2, 3), "b": (4,), "c": (1,)},
        "bent": {"a": (3, 2), "b": (4,)},
        "none": {},
    }.items():
        (tmp_path / name).mkdir()
        if tensors:
            save_file({key: np.zeros(shape) for key, shape in tensors.items()}, tmp_path / name / "x.safetensors")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "x.safetensors").write_bytes(b"junk")
    async with connect(tmp_path / "model") as (client, server):
        dialect = VllmDialect()
        await dialect.pause(client, PauseMode.KEEP)
        for name in ("less", "more", "bent", "none", "junk", "absent"):
            with pytest.raises(ModelError, match=name):
                await dialect.update_from_disk(client, tmp_path / name, version="1")
        assert (0, "default") == (server.engine.version, server.label)
        await dialect.update_from_disk(client, tmp_path / "same", version="1")
        await dialect.resume(client)

    assert (1, "1") == (server.engine.version, server.label)


def test_server_is_started_with_required_options() -> None:
    """The command says what the dialect insists on, and the variables open the routes that it uses."""
    kind = find_kind(Backend.VLLM)
    command = format_command(kind, ServerConfig(python="/v/bin/python", arguments=("--x",)), model=Path("/m"), port=7)

    assert ["/v/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/m"] == command[:5]
    assert {"--enable-scale-out", "processed_logprobs", "7", "--x"} <= set(command)
    assert "1" == kind.environment["VLLM_SERVER_DEV_MODE"]
    assert VllmDialect() == kind.create()
    assert "vllm" == VllmDialect().name
