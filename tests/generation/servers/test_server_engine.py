"""Servers as an engine, over real sockets, in front of a server that dies in every way that real ones do."""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from attrs import evolve
from tests.generation.servers.server_stack import (
    CONFIG,
    WHOLE,
    ask,
    ids_of,
    open_engine,
    open_replicated,
    open_server_stack,
)

from areal_actors.domain import FinishReason, PauseMode, Snapshot, as_floats
from areal_actors.errors import EngineError, InvalidRequest
from areal_actors.generation.servers.sglang import SGLangDialect
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig
from areal_actors.models import load_policy
from areal_actors.testing.engines import EchoEngine
from areal_actors_testing.engine_contract import ENGINE_CHECKS, Check, Subject, collect
from areal_actors_testing.sglang_server import Fault, open_sglang_server

pytestmark = pytest.mark.anyio

ON_A_LOOP_EACH = pytest.mark.parametrize(("is_streamed", "anyio_backend"), [(True, "trio"), (False, "asyncio")])
PROMPT = np.random.default_rng(3).integers(3, 384, 40)


# -------------------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("anyio_backend", ["trio"])  # on asyncio, vLLM's dialect passes the same contract
@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
async def test_servers_keep_the_engine_contract(model: Path, tmp_path: Path, check: Check) -> None:
    """A real model behind the fake: everything that holds for an engine holds through HTTP."""
    policy = load_policy(model).float().eval()

    def recompute(prompt, output):
        ids = torch.tensor(np.concatenate([prompt, output]), dtype=torch.long)
        with torch.no_grad():
            logprobs = torch.log_softmax(policy(ids[None]).logits[0, len(prompt) - 1 : -1], -1)
        return as_floats(logprobs.gather(1, ids[len(prompt) :, None])[:, 0])

    settings = TorchEngineConfig(dtype="float32", max_concurrent=8, max_length=512)
    async with (
        TorchEngine.open(settings, model=model) as torch_engine,
        open_sglang_server(torch_engine, model=model) as server,
        open_engine([server], model, tmp_path) as engine,
    ):
        await check(
            Subject(
                engine=engine,
                create_snapshot=lambda version: Snapshot(version=version, state=policy.state_dict()),
                prompt=PROMPT,
                recompute=recompute,
                num_tokens=100,
            )
        )


# ------------------------------------------------------------------------------------------------------ failures


@ON_A_LOOP_EACH
@pytest.mark.parametrize("fault", [*Fault])
async def test_answer_survives_its_server(model: Path, tmp_path: Path, fault: Fault, *, is_streamed: bool) -> None:
    """Whatever happens to the server, the answer is whole, without a gap and without a token twice."""
    config = evolve(CONFIG, read_timeout_seconds=0.3)
    async with open_server_stack(model, tmp_path, num_servers=2, config=config, is_incremental=True) as (
        engine,
        servers,
    ):
        servers[0].faults.append(fault)  # the first of equally loaded ones is chosen
        chunks = await collect(engine, evolve(ask(), is_streamed=is_streamed))

        assert not servers[0].faults
        assert ids_of(chunks) == WHOLE
        assert chunks[-1].finish is FinishReason.LENGTH
        assert {chunk.version for chunk in chunks} == {0}
        assert engine.statistics().sampled_tokens == 40
        assert engine.statistics().running == engine.statistics().waiting == 0


@pytest.mark.parametrize(("is_incremental", "anyio_backend"), [(True, "trio"), (False, "asyncio")])
async def test_answers_that_no_client_streams_come_in_large_events(
    model: Path, tmp_path: Path, *, is_incremental: bool
) -> None:
    """The first token comes at once, the others eight at a time; a streamed answer comes token by token."""
    async with open_server_stack(model, tmp_path, is_incremental=is_incremental) as (engine, (server,)):
        unstreamed = await collect(engine, evolve(ask(0), is_streamed=False))
        streamed = await collect(engine, ask(1))

        assert ids_of(unstreamed) == ids_of(streamed) == WHOLE
        assert [len(chunk.token_ids) for chunk in unstreamed] == [1, 8, 8, 8, 8, 7]
        assert {len(chunk.token_ids) for chunk in streamed} == {1}
        assert [body["sampling_params"].get("stream_interval") for body in server.bodies] == [8, None]


async def test_load_or_an_abort_within_an_event_is_exact(model: Path, tmp_path: Path) -> None:
    """Tokens that the server has not sent yet keep their versions, and those of an aborted answer arrive."""
    async with open_server_stack(model, tmp_path, is_gated=True) as (engine, (server,)):
        server.engine.release(5)
        async with engine.generate(evolve(ask(), is_streamed=False)) as chunks:
            seen = [await anext(aiter(chunks))]
            while server.engine.statistics().sampled_tokens < 5:
                await anyio.lowlevel.checkpoint()
            await engine.load(Snapshot(version=7, path=model))
            server.engine.release(7)
            while server.engine.statistics().sampled_tokens < 12:
                await anyio.lowlevel.checkpoint()
            await engine.abort("r0")
            seen += [chunk async for chunk in chunks]

        assert ids_of(seen) == WHOLE[:12]
        assert [chunk.version for chunk in seen for _ in chunk.token_ids] == [0] * 5 + [7] * 7
        assert seen[-1].finish is FinishReason.ABORT


async def test_failing_request_does_not_take_down_all_servers(model: Path, tmp_path: Path) -> None:
    """After so many failures without a token it fails itself, and the next one is served."""
    async with open_server_stack(model, tmp_path) as (engine, (server,)):
        server.faults.extend([Fault.ERROR] * 3)
        with pytest.raises(EngineError, match=r"3 times in a row.*out of memory"):
            await collect(engine, ask())

        assert ids_of(await collect(engine, ask())) == WHOLE


async def test_returning_server_gets_weights_first(model: Path, tmp_path: Path) -> None:
    """Killed in the middle of an answer and started again: the present weights, then the rest of the answer."""
    async with open_server_stack(model, tmp_path, is_gated=True) as (engine, (server,)):
        server.engine.release(5)
        await engine.load(Snapshot(version=7, path=model))
        async with engine.generate(ask()) as chunks:
            seen = [await anext(aiter(chunks)) for _ in range(5)]
            await server.kill()
            server.paths.clear()
            await server.start()
            server.engine.release(100)
            seen += [chunk async for chunk in chunks]

        assert ids_of(seen) == WHOLE
        assert {chunk.version for chunk in seen} == {7}
        assert server.label == "7"
        assert server.paths.index("/update_weights_from_disk") < server.paths.index("/generate")
        assert server.bodies[-1]["input_ids"] == [5, 6, 7, *WHOLE[:5]]


async def test_unnoticed_restart_of_a_server_is_detected(model: Path, tmp_path: Path) -> None:
    """One that was started again between two looks has a label that we never gave: its tokens are not taken."""
    async with open_server_stack(model, tmp_path, config=evolve(CONFIG, health_interval_seconds=60)) as (
        engine,
        (server,),
    ):
        await server.kill()
        await server.start()
        chunks = await collect(engine, ask())

        assert ids_of(chunks) == WHOLE
        assert server.label == "0"


@pytest.mark.parametrize("anyio_backend", ["trio"])  # it takes seconds
async def test_sessions_stay_with_their_server(model: Path, tmp_path: Path) -> None:
    """Requests of one session go to one server, by a name that does not open it; when it is gone, they move."""
    async with open_server_stack(model, tmp_path, num_servers=2) as (engine, servers):
        for number in range(12):
            await collect(engine, ask(number, routing_key=f"session-{number % 4}"))
        keys = [set(server.routing_keys) for server in servers]
        assert len(keys[0] | keys[1]) == 4
        assert not keys[0] & keys[1]
        assert not any("session" in key for key in keys[0] | keys[1])
        gone = max(servers, key=lambda server: len(server.bodies))
        await gone.kill()
        for number in range(4):
            assert ids_of(await collect(engine, ask(number, routing_key=f"session-{number}"))) == WHOLE


@ON_A_LOOP_EACH
async def test_stop_string_that_begins_before_a_move_ends_the_answer(
    model: Path, tmp_path: Path, *, is_streamed: bool
) -> None:
    """The other server sees only the tokens after the move, and would go on."""
    text = "".join(f"<{token_id}>" for token_id in WHOLE)
    decode = lambda ids: "".join(f"<{token_id}>" for token_id in ids)  # noqa: E731 - the text of a test's tokens
    begin = len(decode(WHOLE[:4]))
    stop = text[begin + 1 : len(decode(WHOLE[:6])) - 1]  # from within the fifth token to within the sixth
    options = {"num_servers": 2, "is_gated": True, "decode": decode}
    async with open_server_stack(model, tmp_path, **options) as (engine, servers):
        servers[0].engine.release(5)
        request = evolve(ask(stop=(stop,)), is_streamed=is_streamed)
        async with engine.generate(request) as chunks:
            seen = [await anext(aiter(chunks))]
            while sum(len(chunk.token_ids) for chunk in seen) < (5 if is_streamed else 1):
                seen.append(await anext(aiter(chunks)))
            await servers[0].kill()
            servers[1].engine.release(100)
            seen += [chunk async for chunk in chunks]

        assert ids_of(seen) == WHOLE[:6]
        assert seen[-1].finish is FinishReason.STOP
        assert engine.statistics().running == 0


# -------------------------------------------------------------------------------------------------- what is sent


async def test_requests_that_would_crash_a_server_are_not_sent(model: Path, tmp_path: Path) -> None:
    """An id beyond the vocabulary is refused here."""
    async with open_server_stack(model, tmp_path) as (engine, (server,)):
        with pytest.raises(InvalidRequest, match="384 is outside"):
            await collect(engine, evolve(ask(), prompt=[384]))

        assert not server.bodies


async def test_end_token_of_the_model_does_not_end_the_answer(model: Path, tmp_path: Path) -> None:
    """A server stops at the end token of its model; unless the request does, the answer continues."""
    async with open_server_stack(model, tmp_path, end_token_id=WHOLE[10]) as (engine, (server,)):
        chunks = await collect(engine, evolve(ask(), stop_token_ids=(WHOLE[20],)))

        assert ids_of(chunks) == WHOLE[:21]
        assert chunks[-1].finish is FinishReason.STOP
        assert len(server.bodies) == 2


async def test_two_generations_of_one_id_are_refused(model: Path, tmp_path: Path) -> None:
    """Abort could not tell them apart."""
    async with open_server_stack(model, tmp_path) as (engine, _), engine.generate(ask()) as chunks:
        await anext(aiter(chunks))
        with pytest.raises(InvalidRequest, match="is running"):
            await collect(engine, ask())


async def test_generation_that_waits_for_a_pause_can_be_aborted(model: Path, tmp_path: Path) -> None:
    """No server has heard of it yet."""
    async with open_server_stack(model, tmp_path) as (engine, (server,)):

        async def abort() -> None:
            # The request passes the replica set, and an abort of a request that an engine does not know is ignored.
            while "r0" not in engine.engines[0]._running:
                await anyio.lowlevel.checkpoint()
            await engine.abort("r0")

        await engine.pause(PauseMode.ABORT)
        async with anyio.create_task_group() as tasks, engine.generate(ask()) as chunks:
            tasks.start_soon(abort)
            assert [chunk.finish async for chunk in chunks] == [FinishReason.ABORT]

        assert not server.bodies


class Deaf(EchoEngine):
    """Does not hear the first abort, as a server that does not know of the request yet."""

    has_heard = False

    async def abort(self, request_id: str) -> None:
        if self.has_heard:
            await super().abort(request_id)
        self.has_heard = True


async def test_abort_that_arrived_too_early_is_repeated(model: Path, tmp_path: Path) -> None:
    """A server that goes on sampling has not heard it."""
    async with open_server_stack(model, tmp_path, is_gated=True, create_engine=Deaf) as (engine, (server,)):
        server.engine.release(2)
        async with engine.generate(ask()) as chunks:
            seen = [await anext(aiter(chunks))]
            await engine.abort("r0")
            server.engine.release(2)
            seen += [chunk async for chunk in chunks]

        assert seen[-1].finish is FinishReason.ABORT
        assert ids_of(seen) == WHOLE[: len(ids_of(seen))]
        assert len(ids_of(seen)) <= 4


# ------------------------------------------------------------------------------------------------------- opening


async def test_server_that_is_too_old_is_named(model: Path, tmp_path: Path) -> None:
    """With the version that would do."""
    with pytest.raises(EngineError, match=r"SGLang 0\.5\.19; 0\.5\.21 is the oldest"):
        async with open_server_stack(model, tmp_path, version="0.5.19"):
            pass


async def test_unreachable_server_is_named(model: Path, tmp_path: Path) -> None:
    """Within the time that it has."""
    config = evolve(CONFIG, start_timeout_seconds=0.2)
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:1 did not answer within 0\.2 s"):
        async with open_replicated(
            SGLangDialect(),
            config,
            urls=["http://127.0.0.1:1"],
            model=model,
            snapshot=Snapshot(version=0, path=model),
            publish_directory=tmp_path,
        ):
            pass


async def test_errors_of_the_block_are_raised_unchanged(model: Path, tmp_path: Path) -> None:
    """Not in the group of the tasks that look after servers."""
    with pytest.raises(ZeroDivisionError):
        async with open_server_stack(model, tmp_path):
            raise ZeroDivisionError
