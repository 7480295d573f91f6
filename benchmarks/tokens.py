"""CPU time per token that an inference server sends: the cost of the engine of servers, not of sampling.

A server in another process repeats prepared answers on loopback, as fast as they are read, with one or several tokens
in each event; 32 answers are read at a time. Measured is the CPU time of this process alone, per token: HTTP, events,
JSON, attribution to versions, and chunks. Time on the clock is not measured, because the server runs on the other core.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path

import anyio
import numpy as np
from anyio.abc import SocketStream
from benchmarks.harness import Result
from benchmarks.machine import ROOT

from areal_actors.domain import EngineRequest, SampleKey, Sampling, Snapshot
from areal_actors.generation import Engine
from areal_actors.generation.servers.config import Backend, ServerConfig
from areal_actors.generation.servers.engine import open_server_engines
from areal_actors.generation.servers.launching import find_kind
from areal_actors.models.built_in import create_tiny

_NUM_TOKENS = 1024
"""Of each answer."""
_NUM_CONCURRENT = 32
_PROMPT = np.arange(3, 35, dtype=np.int32)
_GATE_US = 10.0
"""For a token of an event of 32, which is what answers that no client streams come in."""
_NUMBERS = (1, 8, 32)

_ids = count()


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the signature of every benchmark
    """CPU microseconds per token, for each kind of server and number of tokens in an event."""
    results = []
    with tempfile.TemporaryDirectory() as directory:
        model = create_tiny(Path(directory))
        for backend in (Backend.SGLANG, Backend.VLLM):
            for number in _NUMBERS:
                with _serving(backend, model, number) as url:
                    microseconds = anyio.run(_measure, backend, url, model, 3 if quick else 5)
                results.append(
                    Result(
                        benchmark="tokens",
                        name=f"{backend}, events of {number} token{'s' * (number > 1)}",
                        value=min(microseconds),
                        unit="µs CPU/token",
                        gate=_GATE_US if number == max(_NUMBERS) else None,
                        detail={"tokens": _NUM_TOKENS * _NUM_CONCURRENT, "max": max(microseconds)},
                    )
                )
    return results


async def _measure(backend: Backend, url: str, model: Path, rounds: int) -> list[float]:
    kind, microseconds = find_kind(backend), []
    async with open_server_engines(
        kind.create(),
        ServerConfig(health_interval_seconds=60),
        urls=[url],
        model=model,
        snapshot=Snapshot(version=0, path=model),
        publish_directory=model.parent / "published",
    ) as opened:
        (engine,) = opened.engines.values()
        await _read(engine)
        for _ in range(rounds):
            begun = time.process_time()
            async with anyio.create_task_group() as tasks:
                for _ in range(_NUM_CONCURRENT):
                    tasks.start_soon(_read, engine)
            microseconds.append(1e6 * (time.process_time() - begun) / _NUM_CONCURRENT / _NUM_TOKENS)
    return microseconds


async def _read(engine: Engine) -> None:
    request = EngineRequest(
        id=f"answer-{next(_ids)}",
        prompt=_PROMPT,
        sampling=Sampling(max_new_tokens=_NUM_TOKENS),
        key=SampleKey(seed=1),
    )
    num_tokens = 0
    async with engine.generate(request) as chunks:
        async for chunk in chunks:
            num_tokens += len(chunk.token_ids)
    assert num_tokens == _NUM_TOKENS


# ------------------------------------------------------------------------------------------------------ the server


@contextmanager
def _serving(backend: Backend, model: Path, number: int) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.tokens", backend, str(model), str(number)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield child.stdout.readline().strip()
        finally:
            child.kill()


def _sglang_answer(number: int) -> list[bytes]:
    """The events of an answer, as a server streams them that was started with --incremental-streaming-output."""
    events = []
    for start, ids in _spans(number):
        is_last = start + len(ids) == _NUM_TOKENS
        meta = {
            "id": "5c1f0f5d0a0e4bd7a3b9a3a05ad4e0d2-answer",
            "finish_reason": {"type": "length", "length": _NUM_TOKENS} if is_last else None,
            "prompt_tokens": len(_PROMPT),
            "weight_version": "0",
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "output_token_logprobs": [[-1.2345678 - 0.001 * token, token, None] for token in ids],
            "completion_tokens": start + len(ids),
            "cached_tokens": 0,
        }
        if is_last:
            meta["weight_versions"] = [{"version": "0", "start": 0, "end": _NUM_TOKENS}]
        events.append({"text": "", "output_ids": ids, "meta_info": meta})
    return _format(events)


def _vllm_answer(number: int) -> list[bytes]:
    events = []
    for start, ids in _spans(number):
        is_last = start + len(ids) == _NUM_TOKENS
        content = [{"token_id": token, "logprob": -1.2345678 - 0.001 * token, "rank": 3} for token in ids]
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": "length" if is_last else None,
        }
        if is_last:
            choice["weight_versions"] = [{"version": "0", "start": 0, "end": _NUM_TOKENS}]
        events.append({"request_id": "generate-tokens-5c1f0f5d0a0e4bd7a3b9a3a05ad4e0d2", "choices": [choice]})
    return _format(events)


def _spans(number: int) -> Iterator[tuple[int, list[int]]]:
    """The first token comes alone, so that a client sees it early."""
    bounds = [0, *range(1, _NUM_TOKENS, number), _NUM_TOKENS]
    for start, end in pairwise(bounds):
        yield start, [3 + 7 * position % 300 for position in range(start, end)]


def _format(events: list[dict[str, object]]) -> list[bytes]:
    texts = [*(json.dumps(event) for event in events), "[DONE]"]
    return [_frame(f"data: {text}\n\n".encode()) for text in texts]


def _frame(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _documents(backend: Backend, model: Path) -> dict[str, object]:
    """What the server says about itself."""
    if backend is Backend.SGLANG:
        state = {"effective_max_running_requests_per_dp": 256}
        return {
            "/server_info": {"version": "0.5.23", "dtype": "float32", "internal_states": [state]},
            "/model_info": {"model_path": str(model), "weight_version": "0"},
            "/v1/models": {"data": [{"id": "tiny", "max_model_len": 4096}]},
        }
    config = {
        "model_config": {
            "model": str(model),
            "max_model_len": 4096,
            "dtype": "torch.float32",
            "logprobs_mode": "processed_logprobs",
        },
        "scheduler_config": {"max_num_seqs": 256},
        "structured_outputs_config": {"backend": "guidance"},
        "device_config": {"device": "cuda"},
    }
    return {
        "/version": {"version": "0.32.0"},
        "/weight_info": {"weight_version": "0"},
        "/server_info?config_format=json": {"vllm_config": config},
        "/v1/models": {"data": [{"id": "tiny", "root": str(model)}]},
    }


async def _serve(backend: Backend, model: Path, number: int) -> None:
    answer = _sglang_answer(number) if backend is Backend.SGLANG else _vllm_answer(number)
    documents = _documents(backend, model)

    async def handle(stream: SocketStream) -> None:
        try:
            async for path, body in _requests(stream):
                if path in ("/generate", "/inference/v1/generate") and len(body) > len(b"{}"):
                    await stream.send(_STREAM)
                    for event in answer:  # each by itself, as a server sends them
                        await stream.send(event)
                    await stream.send(b"0\r\n\r\n")
                else:
                    is_empty_request = backend is Backend.VLLM and body == b"{}"
                    text = json.dumps(documents.get(path, {"success": True})).encode()
                    status = b"400 Bad Request" if is_empty_request else b"200 OK"
                    await stream.send(_DOCUMENT % (status, len(text), text))
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            pass

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        print(f"http://127.0.0.1:{listener.listeners[0].extra(anyio.abc.SocketAttribute.local_port)}", flush=True)
        await listener.serve(handle)


async def _requests(stream: SocketStream) -> AsyncIterator[tuple[str, bytes]]:
    data = b""
    while True:
        while b"\r\n\r\n" not in data:
            data += await stream.receive()
        head, _, data = data.partition(b"\r\n\r\n")
        path = head.split(b" ", 2)[1].decode()
        lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
        length = int(lengths[0]) if lengths else 0
        while len(data) < length:
            data += await stream.receive()
        body, data = data[:length], data[length:]
        yield path, body


_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_DOCUMENT = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"

if __name__ == "__main__":
    anyio.run(_serve, Backend(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
