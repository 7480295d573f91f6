"""The embedded engine with real (tiny) models: exactness in any company, weights that change, all that fails."""

from __future__ import annotations

import copy
import threading
import time
from itertools import cycle

import anyio
import numpy as np
import pytest
import torch
from anyio.lowlevel import checkpoint
from attrs import evolve
from tests.generation.tiny_models import SETTINGS, create_llama, create_model
from transformers import BertConfig, BertLMHeadModel

from areal_actors.domain import FinishReason, Snapshot
from areal_actors.errors import EngineError, InvalidRequest, ModelError
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig, worker
from areal_actors.generation.torch.forward import LlamaForward, create_forward
from areal_actors.generation.torch.rows import CachedModel
from areal_actors.generation.torch.worker import StepRunner
from areal_actors_testing.engine_contract import collect, join_ids

pytestmark = pytest.mark.anyio
RNG = np.random.default_rng(5)
PROMPT = RNG.integers(0, 96, 70)
CONFIG = TorchEngineConfig(dtype="float32", max_concurrent=6, prefill_chunk=16)


def create_prompts(number: int):
    """Prompts that share much, little and nothing, of different lengths."""
    return [np.concatenate([PROMPT[: 20 * (i % 4)], RNG.integers(0, 96, 1 + i)]) for i in range(number)]


def join_logprobs(chunks):
    """All log-probabilities of a generation."""
    return np.concatenate([chunk.logprobs for chunk in chunks])


async def run_all(engine, requests):
    """All requests at once; chunks in the order of the requests."""
    results = [[]] * len(requests)

    async def run(i: int) -> None:
        results[i] = await collect(engine, requests[i])

    async with anyio.create_task_group() as tasks:
        for i in range(len(requests)):
            tasks.start_soon(run, i)
    return results


@pytest.fixture(params=["llama", "gemma3_text", "qwen3_5_text"])
def model(request):
    """The lean path; the modules of a model whose prefixes can be continued, and of one whose prefixes cannot."""
    return create_llama() if request.param == "llama" else create_model(request.param)


# The path matters here, and not the loop: each family runs on one.
@pytest.mark.parametrize(("family", "anyio_backend"), [*zip(SETTINGS, cycle(("asyncio", "trio")))])
async def test_logprobs_are_exact_in_any_batch(create_request, recompute, family):
    """Mixed lengths, shared prefixes, chunked prefill, joining and leaving: each token's logprob is the model's own."""
    model = create_model(family)
    prompts = create_prompts(14)
    requests = [create_request(i, p, max_new_tokens=10 + 3 * i) for i, p in enumerate(prompts)]
    async with TorchEngine.open(CONFIG, model=model) as engine:
        results = await run_all(engine, requests)
        kind = type(engine._worker._forward)

    assert kind is (LlamaForward if family in {"qwen2", "qwen3"} else CachedModel)
    for prompt, chunks in zip(prompts, results, strict=True):
        expected = recompute(model, prompt, join_ids(chunks))
        np.testing.assert_allclose(join_logprobs(chunks), expected, atol=1e-4, rtol=0)


async def test_group_and_next_turn_use_the_prefix_cache(model, create_request, recompute):
    """Equal prompts are computed once; a prompt that extends an answer reuses all of it; logprobs stay exact."""
    async with TorchEngine.open(CONFIG, model=model) as engine:
        group = await run_all(engine, [create_request(i, PROMPT, max_new_tokens=9) for i in range(6)])
        cached = [chunks[0].num_cached_tokens for chunks in group]
        turn = np.concatenate([PROMPT, join_ids(group[2]), [1, 2, 3]])
        chunks = await collect(engine, create_request(9, turn, max_new_tokens=9))

    assert sorted(cached) == [0] + [len(PROMPT)] * 5
    assert len({tuple(join_ids(c)) for c in group}) > 1
    assert chunks[0].num_cached_tokens == len(turn) - 3 - 1
    for prompt, found in ((turn, chunks), *((PROMPT, each) for each in group)):
        np.testing.assert_allclose(join_logprobs(found), recompute(model, prompt, join_ids(found)), atol=1e-4)


async def test_running_generations_continue_with_new_weights(model, create_request, recompute):
    """After a load each logprob is that of the new weights given the whole prefix, and old keys are not reused."""
    new = copy.deepcopy(model)
    with torch.no_grad():
        for weight in new.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    async with TorchEngine.open(CONFIG, model=model, version=4) as engine:
        async with (
            engine.generate(create_request(0, PROMPT, max_new_tokens=60)) as first,
            engine.generate(create_request(1, PROMPT[:30], max_new_tokens=60)) as second,
        ):
            streams = [[await anext(aiter(stream))] for stream in (first, second)]
            await engine.load(Snapshot(version=5, state=new.state_dict()))
            for chunks, stream in zip(streams, (first, second), strict=True):
                chunks += [chunk async for chunk in stream]
        again = await collect(engine, create_request(2, PROMPT, max_new_tokens=5))

    for prompt, chunks in zip((PROMPT, PROMPT[:30]), streams, strict=True):
        ids = join_ids(chunks)
        versions = np.concatenate([np.full(len(c.token_ids), c.version) for c in chunks])
        expected = np.where(versions == 4, recompute(model, prompt, ids), recompute(new, prompt, ids))
        assert {4, 5} == set(versions.tolist())
        np.testing.assert_allclose(join_logprobs(chunks), expected, atol=1e-4)
    np.testing.assert_allclose(join_logprobs(again), recompute(new, PROMPT, join_ids(again)), atol=1e-4)


async def test_snapshot_that_does_not_fit_keeps_the_old_weights(llama, create_request, recompute):
    """``ModelError``, the old version, and sampling goes on."""
    async with TorchEngine.open(CONFIG, model=llama, version=3) as engine:
        with pytest.raises(ModelError, match="missing"):
            await engine.load(Snapshot(version=4, state={}))
        chunks = await collect(engine, create_request(0, PROMPT, max_new_tokens=5))
        version = engine.version

    assert version == 3
    np.testing.assert_allclose(join_logprobs(chunks), recompute(llama, PROMPT, join_ids(chunks)), atol=1e-4)


async def test_saved_model_is_opened_and_loaded(llama, create_request, recompute, tmp_path):
    """A directory opens an engine, and a snapshot may be one too."""
    new = type(llama)(llama.config).eval()
    llama.save_pretrained(tmp_path / "old")
    new.save_pretrained(tmp_path / "new")
    async with TorchEngine.open(CONFIG, model=tmp_path / "old") as engine:
        before = await collect(engine, create_request(0, PROMPT, max_new_tokens=5))
        await engine.load(Snapshot(version=1, path=tmp_path / "new"))
        after = await collect(engine, create_request(1, PROMPT, max_new_tokens=5))

    np.testing.assert_allclose(join_logprobs(before), recompute(llama, PROMPT, join_ids(before)), atol=1e-4)
    np.testing.assert_allclose(join_logprobs(after), recompute(new, PROMPT, join_ids(after)), atol=1e-4)


async def test_engine_has_a_copy_of_the_trained_model(llama, create_request):
    """The engine has its own copy of the weights, and opening it leaves the given model as it was."""
    before = {name: value.clone() for name, value in llama.state_dict().items()}
    async with TorchEngine.open(CONFIG, model=llama) as engine:
        old = await collect(engine, create_request(0, PROMPT, max_new_tokens=5))
        assert all(torch.equal(before[name], value) for name, value in llama.state_dict().items())
        with torch.no_grad():
            for parameter in llama.parameters():
                parameter.zero_()
        new = await collect(engine, create_request(0, PROMPT, max_new_tokens=5))

    assert join_ids(old) == join_ids(new)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_deterministic_samples_do_not_depend_on_the_batch(model, create_request, dtype):
    """Any order and any concurrency give the same ids and the same bits of logprobs."""
    config = TorchEngineConfig(dtype=dtype, max_concurrent=8, prefill_chunk=16, deterministic=True)
    prompts = [*create_prompts(9), PROMPT, PROMPT]
    requests = [create_request(i, p, max_new_tokens=8 + 2 * i, temperature=1.0) for i, p in enumerate(prompts)]
    async with TorchEngine.open(config, model=model) as engine:
        alone = [await collect(engine, request) for request in requests]
    async with TorchEngine.open(config, model=model) as engine:
        order = RNG.permutation(len(requests))
        together = await run_all(engine, [requests[i] for i in order])

    for place, i in enumerate(order):
        assert join_ids(alone[i]) == join_ids(together[place])
        assert join_logprobs(alone[i]).tobytes() == join_logprobs(together[place]).tobytes()


async def test_stop_strings_end_at_the_completing_token(model, create_request):
    """Ids stay exact: the last one is the token that completed the stop string, not cut."""

    def decode(ids) -> str:
        return "".join(f"<{int(i)}>" for i in ids)

    async with TorchEngine.open(CONFIG, model=model, decode=decode) as engine:
        free = join_ids(await collect(engine, create_request(0, PROMPT, max_new_tokens=12)))
        stop = f"{free[3]}><{free[4]}"
        chunks = await collect(engine, create_request(0, PROMPT, max_new_tokens=12, stop=(stop,)))

    assert free[:5] == join_ids(chunks)
    assert chunks[-1].finish is FinishReason.STOP


async def test_failed_thread_fails_all_requests(llama, create_request, monkeypatch):
    """Waiting and later calls raise ``EngineError`` with the cause, and none hangs."""

    def explode(*_):
        raise MemoryError("no memory for keys")

    async with TorchEngine.open(CONFIG, model=llama) as engine:
        async with engine.generate(create_request(0, PROMPT, max_new_tokens=100)) as chunks:
            await anext(aiter(chunks))
            monkeypatch.setattr(StepRunner, "launch", explode)
            with pytest.raises(EngineError, match="no memory for keys"):
                async for _ in chunks:
                    pass
        with pytest.raises(EngineError) as caught:
            await collect(engine, create_request(1, PROMPT))
        with pytest.raises(EngineError):
            await engine.pause()

    assert isinstance(caught.value.__cause__, MemoryError)


async def test_engine_that_does_not_open_leaves_no_thread(llama):
    """Neither its own nor the one that watches it."""

    def explode(*_, **__):
        raise MemoryError("no memory for keys")

    before = set(threading.enumerate())
    with pytest.raises(EngineError, match="no memory for keys"):
        async with TorchEngine.open(CONFIG, model=llama, create_runner=explode):
            pass

    threads = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("areal")]
    for thread in threads:
        thread.join(5)  # it has said that it ends, and may not have returned yet
    assert [] == [thread.name for thread in threads if thread.is_alive()]


@pytest.fixture
def hang(monkeypatch):
    """Let the function of this name of a class or a module wait until the test is over."""
    is_over = threading.Event()

    def replace(owner, name: str) -> None:
        monkeypatch.setattr(owner, name, lambda *_, **__: is_over.wait())

    yield replace
    is_over.set()


async def test_step_that_hangs_fails_all_requests(llama, create_request, hang):
    """Requests, later calls and ``wait_failed`` get an error that says where the thread is; closing does not wait."""
    config = evolve(CONFIG, step_timeout_seconds=0.2)
    with anyio.fail_after(30):
        async with TorchEngine.open(config, model=llama) as engine:
            async with engine.generate(create_request(0, PROMPT, max_new_tokens=100)) as chunks:
                await anext(aiter(chunks))
                hang(StepRunner, "launch")
                with pytest.raises(EngineError, match=r"hangs in wait \(.*more than 0.2 s.*step_timeout_seconds"):
                    async for _ in chunks:
                        pass
            with pytest.raises(EngineError, match="hangs"):
                await collect(engine, create_request(1, PROMPT))
            with pytest.raises(EngineError, match="hangs") as caught:
                await engine.wait_failed()

    assert isinstance(caught.value.__cause__, TimeoutError)


async def test_load_that_hangs_fails(llama, hang):
    """It is shielded from cancellation, so that without a deadline nothing ended it."""
    config = evolve(CONFIG, step_timeout_seconds=0.2)
    hang(worker, "load_snapshot")
    with anyio.fail_after(30):
        async with TorchEngine.open(config, model=llama) as engine:
            with pytest.raises(EngineError, match="a load of weights, has taken more than"):
                await engine.load(Snapshot(version=1, state=llama.state_dict()))


@pytest.mark.parametrize("limit", [0.5, None])
async def test_many_short_steps_do_not_count_as_a_hang(llama, create_request, monkeypatch, limit):
    """Each step has the time limit for itself."""
    original = StepRunner.launch

    def launch_slowly(*args):
        time.sleep(0.02)
        return original(*args)

    monkeypatch.setattr(StepRunner, "launch", launch_slowly)
    began = time.monotonic()
    async with TorchEngine.open(evolve(CONFIG, step_timeout_seconds=limit), model=llama) as engine:
        chunks = await collect(engine, create_request(0, PROMPT, max_new_tokens=30))

    assert len(join_ids(chunks)) == 30
    assert time.monotonic() - began > 0.5


async def test_non_finite_logits_fail_only_their_generation(model, create_request):
    """NaN logits are an ``EngineError`` of the generation; sound weights make the engine serve again."""
    broken = copy.deepcopy(model)
    with torch.no_grad():
        for weight in broken.parameters():
            weight.fill_(torch.nan)
    async with TorchEngine.open(CONFIG, model=model) as engine:
        await engine.load(Snapshot(version=1, state=broken.state_dict()))
        with pytest.raises(EngineError, match="not finite"):
            await collect(engine, create_request(0, PROMPT))
        await engine.load(Snapshot(version=2, state=model.state_dict()))
        chunks = await collect(engine, create_request(1, PROMPT, max_new_tokens=4))

    assert len(join_ids(chunks)) == 4


async def test_closed_engine_aborts_running_generations(model, create_request):
    """Generations that run when the engine closes end with ABORT; later calls say that it is closed."""
    seen = []
    async with (
        anyio.create_task_group() as tasks,
        TorchEngine.open(CONFIG, model=model) as engine,
    ):
        started = anyio.Event()

        async def consume() -> None:
            async with engine.generate(create_request(0, PROMPT, max_new_tokens=180)) as chunks:
                async for chunk in chunks:
                    seen.append(chunk)
                    started.set()

        tasks.start_soon(consume)
        await started.wait()
    with pytest.raises(EngineError, match="closed"):
        await collect(engine, create_request(1, PROMPT))

    assert seen[-1].finish is FinishReason.ABORT


async def test_id_names_one_generation(llama, create_request):
    """A second generation with the id of a running one is refused; afterwards the id is free."""
    async with TorchEngine.open(CONFIG, model=llama) as engine:
        async with engine.generate(create_request(0, PROMPT)):
            with pytest.raises(InvalidRequest, match="running"):
                await collect(engine, create_request(0, PROMPT))
        chunks = await collect(engine, create_request(0, PROMPT, max_new_tokens=2))

    assert len(join_ids(chunks)) == 2


async def test_slow_consumer_does_not_delay_others(llama, create_request):
    """An unread stream keeps its tokens while others end; read late, it is complete."""
    async with (
        TorchEngine.open(CONFIG, model=llama) as engine,
        engine.generate(create_request(0, PROMPT, max_new_tokens=30)) as slow,
    ):
        await collect(engine, create_request(1, PROMPT, max_new_tokens=60))
        while engine.statistics().running:
            await checkpoint()
        chunks = [chunk async for chunk in slow]

    assert len(join_ids(chunks)) == 30


async def test_model_without_a_cache_is_refused():
    """Before anything is sampled, with what to use instead."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertLMHeadModel(BertConfig(**sizes, is_decoder=False)).eval()
    with pytest.raises(ModelError, match=r"keeps no cache of the tokens .* serve it with an inference server"):
        async with TorchEngine.open(CONFIG, model=model):
            pass


async def test_inexact_lean_path_is_not_used(llama, monkeypatch, caplog):
    """If the lean path computed something else, the model's own modules are used, and the log says why."""
    original = LlamaForward._normalize
    monkeypatch.setattr(LlamaForward, "_normalize", lambda *args, **kw: 1.05 * original(*args, **kw))
    with torch.no_grad(), caplog.at_level("INFO"):
        forward = create_forward(llama)

    assert isinstance(forward, CachedModel)
    assert "differ by" in caplog.text


@pytest.mark.parametrize(
    ("family", "effect"),
    [
        ("mamba", "what continues a prompt is computed token by token"),
        ("qwen3_5_text", "a prompt is computed again unless it is equal to another, or continues an answer"),
        ("deepseek_v4", "each generation takes a pass of its own"),
    ],
)
async def test_what_a_model_cannot_share_is_said(family, effect, caplog):
    """The log names the path, and what it costs with this model."""
    with torch.no_grad(), caplog.at_level("INFO"):
        create_forward(create_model(family))

    assert effect in caplog.text


async def test_directory_without_a_model_is_refused(tmp_path):
    """``ModelError`` names the directory."""
    with pytest.raises(ModelError, match=str(tmp_path)):
        async with TorchEngine.open(CONFIG, model=tmp_path):
            pass


async def test_half_precision_model_is_verified_in_full_precision(llama):
    """Rounding in bfloat16 is not a reason to refuse a path: the same one is chosen as for the float32 model."""
    with torch.no_grad():
        forward = create_forward(copy.deepcopy(llama).to(torch.bfloat16))

    assert isinstance(forward, LlamaForward)
    assert {torch.bfloat16} == {weight.dtype for weight in forward.parameters.values()}
