"""The unmodified SDK against an open server: training, sampling, checkpoints, agents, and what goes wrong."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
import tinker
import zstandard
from anyio import to_thread
from tinker import types

from areal_actors.errors import ConfigError
from areal_actors_tinker.config import TinkerConfig
from areal_actors_tinker.server import TinkerServer, check_access, open_server
from areal_actors_tinker.service import MAX_EPHEMERAL

T = TypeVar("T")
TOKENS = [20, 31, 42, 53, 64, 75, 86, 97]
pytestmark = [
    pytest.mark.anyio,
    # The SDK warns of names that newer versions of it drop, and keeps sockets until the process ends.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
        "ignore::ResourceWarning",
        "ignore::pytest.PytestUnraisableExceptionWarning",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def forgotten_sockets() -> Iterator[None]:
    """Collect what the SDK leaves open, which would otherwise be reported at the end of the session."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


OPEN: list[tinker.ServiceClient] = []
"""Clients that ``run`` closes."""


@asynccontextmanager
async def served(root: Path, **settings: Any) -> AsyncIterator[TinkerServer]:
    """A server of the tiny model on a free port."""
    async with open_server(TinkerConfig(model="tiny", port=0, fileroot=root, **settings)) as server:
        yield server


async def run(function: Callable[..., T], *args: Any) -> T:
    """Call the SDK, which blocks, from a thread, and close the clients that it has opened."""

    def call() -> T:
        try:
            return function(*args)
        finally:
            while OPEN:
                OPEN.pop().close("success").result()

    return await to_thread.run_sync(call)


def connect(server: TinkerServer, key: str = "tml-one") -> tinker.ServiceClient:
    """A client of the server."""
    client = tinker.ServiceClient(base_url=server.url, api_key=key)
    OPEN.append(client)
    return client


def create(client: tinker.ServiceClient, **options: Any) -> tinker.TrainingClient:
    """A training client of the SDK, whichever version of it is installed."""
    created: Any = client.create_lora_training_client(base_model="tiny", **{"rank": 4, **options})
    return created.result() if hasattr(created, "result") else created


def supervised(tokens: list[int] = TOKENS) -> types.Datum:
    """An example that makes ``tokens`` more probable."""
    inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def train(client: tinker.TrainingClient, num_steps: int, rate: float = 0.01) -> list[float]:
    """Make steps with both requests sent at once, as the SDK advises; return the losses."""
    losses = []
    for _ in range(num_steps):
        passed = client.forward_backward([supervised()], "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=rate))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


async def test_client_trains_samples_and_continues(tmp_path):
    """The loss falls; samples have the trainer's log-probabilities; a checkpoint continues where it was."""

    def use(server: TinkerServer) -> None:
        service = connect(server)
        client = create(service)
        losses = train(client, 5)
        assert losses[-1] < losses[0] / 2
        assert "tiny" == client.get_info().model_name

        sampler: Any = client.save_weights_and_get_sampling_client().result()
        prompt, params = types.ModelInput.from_ints(TOKENS[:3]), types.SamplingParams(max_tokens=5, seed=1, stop=[])
        answer = sampler.sample(prompt, num_samples=4, sampling_params=params).result()
        assert [5] * 4 == [len(one.tokens) for one in answer.sequences]
        again = sampler.sample(prompt, num_samples=4, sampling_params=params).result()
        assert [list(one.tokens) for one in answer.sequences] == [list(one.tokens) for one in again.sequences]
        for one in answer.sequences:
            whole = [*TOKENS[:3], *map(int, one.tokens)]
            scored = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()
            np.testing.assert_allclose(scored[3:], one.logprobs, atol=1e-4)
            passed = client.forward([supervised(whole)], "cross_entropy").result()
            np.testing.assert_allclose(passed.loss_fn_outputs[0]["logprobs"].data[2:], one.logprobs, atol=1e-4)

        path = client.save_state("here").result().path
        more: Any = service.create_training_client_from_state_with_optimizer(path).result()
        assert train(more, 2) == pytest.approx(train(client, 2), abs=1e-5)

    async with served(tmp_path) as server:
        await run(use, server)


async def test_agent_samples_what_a_client_trained(tmp_path):
    """A greedy chat completion that names a checkpoint has the tokens that the SDK samples from it."""

    def use(server: TinkerServer) -> tuple[str, list[int]]:
        client = create(connect(server))
        train(client, 3)
        path = client.save_weights_for_sampler("named").result().path
        sampler: Any = connect(server).create_sampling_client(model_path=path)
        sampler = sampler.result() if hasattr(sampler, "result") else sampler
        ids = client.get_tokenizer().encode("fox", add_special_tokens=False)
        greedy = types.SamplingParams(max_tokens=6, temperature=0.0)
        found = sampler.sample(types.ModelInput.from_ints(ids), num_samples=1, sampling_params=greedy).result()
        return path, [*ids, *map(int, found.sequences[0].tokens)]

    async with served(tmp_path) as server:
        path, tokens = await run(use, server)
        model_id, _, name = path.removeprefix("tinker://").split("/")
        headers = {"Authorization": f"Bearer {server.admin_key}"}
        async with httpx.AsyncClient(base_url=server.agent_url, headers=headers, timeout=60) as agent:
            body = {"model": f"{model_id.replace(':', '.')}/{name}", "prompt": "fox", "max_tokens": 6, "temperature": 0}
            answer = await agent.post("/completions", json=body)
            wrong = await agent.post("/completions", json=body | {"model": "run/absent"})

    assert 200 == answer.status_code, answer.text
    assert answer.json()["usage"]["completion_tokens"] == len(tokens) - answer.json()["usage"]["prompt_tokens"]
    assert 404 == wrong.status_code or "absent" not in wrong.text


async def test_custom_loss_moves_what_its_gradient_says(tmp_path):
    """A loss on the client has the gradient of the equal loss on the server."""

    def negated(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        total = -sum(one.sum() for one in logprobs)
        return total, {"own": float(total.detach())}

    def use(server: TinkerServer) -> None:
        service = connect(server)
        one, other = create(service, seed=5), create(service, seed=5)
        for _ in range(2):
            found = one.forward_backward_custom([supervised()], negated)
            one.optim_step(types.AdamParams(learning_rate=0.01)).result()
            assert found.result().metrics["own"] == pytest.approx(train(other, 1)[0], abs=1e-4)

    async with served(tmp_path) as server:
        await run(use, server)


async def test_mistakes_are_errors_of_the_sdk_and_cost_nothing(tmp_path):
    """Each has the SDK's own class and names the mistake; afterwards the client trains on."""

    def use(server: TinkerServer) -> None:
        service = connect(server)
        client = create(service)
        wrong = supervised()
        wrong.loss_fn_inputs["weights"] = types.TensorData(data=[float("nan")] * 7, dtype="float32", shape=[7])
        mistakes: list[tuple[Callable[[], Any], str]] = [
            (lambda: client.forward_backward([supervised()], "nonsense"), "no loss function 'nonsense'"),  # type: ignore[arg-type]
            (lambda: client.forward_backward([wrong], "cross_entropy"), "weights of datum 0 has a value"),
            (lambda: client.forward_backward([supervised(list(range(1030)))], "cross_entropy"), "the model reads 1024"),
            (lambda: client.forward_backward([supervised()], "ppo"), "lacks loss_fn_inputs logprobs, advantages"),
        ]
        for call, complaint in mistakes:
            with pytest.raises(tinker.RequestFailedError, match=complaint):
                call().result()
        with pytest.raises(tinker.RequestFailedError, match="There is no checkpoint"):
            client.load_state("tinker://nowhere/weights/x").result()
        with pytest.raises(tinker.NotFoundError, match="no base model 'other'"):
            service.create_lora_training_client("other").result()
        with pytest.raises(tinker.RequestFailedError, match="choose one from 1 to"):
            create(service, rank=4096)
        with pytest.raises(tinker.RequestFailedError, match="is not the name of a checkpoint"):
            client.save_state("../up").result()
        client.save_state("twice").result()
        with pytest.raises(tinker.RequestFailedError, match="'twice' exists"):
            client.save_state("twice").result()
        losses = train(client, 3)
        assert losses[-1] < losses[0]

    async with served(tmp_path) as server:
        await run(use, server)


async def test_users_see_only_their_own(tmp_path):
    """Another key finds neither session, model, checkpoint nor result, until a checkpoint is published."""

    def use(server: TinkerServer) -> None:
        client = create(connect(server))
        path = client.save_state("mine").result().path
        model_id = path.removeprefix("tinker://").split("/")[0]
        stranger = connect(server, "tml-two").create_rest_client()
        for call in (
            lambda: stranger.get_training_run(model_id),
            lambda: stranger.get_weights_info_by_tinker_path(path),
            lambda: stranger.delete_checkpoint_from_tinker_path(path),
        ):
            with pytest.raises(tinker.NotFoundError):
                call().result()
        assert [] == stranger.list_training_runs().result().training_runs
        headers = {"X-API-Key": "tml-two"}
        found = httpx.post(
            f"{server.url}/api/v1/retrieve_future", headers=headers, json={"request_id": f"{model_id}:1"}
        )
        assert 404 == found.status_code

        owner = connect(server, "tml-one").create_rest_client()
        owner.publish_checkpoint_from_tinker_path(path).result()
        assert 4 == stranger.get_weights_info_by_tinker_path(path).result().lora_rank
        owner.unpublish_checkpoint_from_tinker_path(path).result()
        assert ["weights/mine"] == [one.checkpoint_id for one in owner.list_checkpoints(model_id).result().checkpoints]
        owner.delete_checkpoint_from_tinker_path(path).result()
        assert [] == owner.list_user_checkpoints().result().checkpoints
        assert [] == list((tmp_path / model_id.replace(":", ".") / "weights").iterdir())

    async with served(tmp_path) as server:
        await run(use, server)


async def test_checkpoints_outlive_the_server(tmp_path):
    """A new server lists, samples and continues what an earlier one saved; an external one is downloaded."""

    def save(server: TinkerServer) -> tuple[str, float]:
        client = create(connect(server))
        train(client, 2)
        path = client.save_state("kept").result().path
        left = next(tmp_path.glob("*/weights")).with_name("sampler_weights") / "ephemeral-9"
        left.mkdir(parents=True)  # as of a server that was killed
        left.with_name("ephemeral-9.json").write_text("{}")
        external = client.save_weights_external("whole").result().path
        urls = connect(server, "tml-one").create_rest_client().get_external_weights_urls(external).result().urls
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= urls.keys()
        assert 200 == httpx.get(urls["config.json"]).status_code
        assert 404 == httpx.get(urls["config.json"].split("?")[0]).status_code
        return path, train(client, 1)[0]

    def load(server: TinkerServer, path: str, loss: float) -> None:
        client: Any = connect(server).create_training_client_from_state_with_optimizer(path).result()
        assert train(client, 1)[0] == pytest.approx(loss, abs=1e-5)
        assert [] == list(tmp_path.glob("*/sampler_weights/ephemeral-*"))

    async with served(tmp_path) as server:
        saved = await run(save, server)
    async with served(tmp_path) as server:
        await run(load, server, *saved)


async def test_requests_run_by_number_and_once(tmp_path):
    """Parts that arrive in another order, and twice, are computed in order, and each once."""
    async with served(tmp_path) as server, httpx.AsyncClient(timeout=60) as http:
        http.base_url, http.headers["X-API-Key"] = httpx.URL(f"{server.url}/api/v1"), "tml-a"

        async def post(route: str, **body: Any) -> Any:
            answer = await http.post(route, json=body)
            assert 200 == answer.status_code, answer.text
            return answer.json()

        session = (await post("create_session", tags=[], user_metadata=None, sdk_version="x"))["session_id"]
        model = {"base_model": "tiny", "lora_config": {"rank": 2}}
        created = await post("create_model", session_id=session, model_seq_id=0, **model)
        model_id = (await post("retrieve_future", request_id=created["request_id"]))["model_id"]
        second = await post("save_weights", model_id=model_id, seq_id=2, path="b")
        early = await http.post("optim_step", json={"model_id": model_id, "seq_id": 20_000, "adam_params": {}})
        first = await post("optim_step", model_id=model_id, seq_id=1, adam_params={"learning_rate": 0.1})
        again = await post("optim_step", model_id=model_id, seq_id=1, adam_params={"learning_rate": 0.1})
        assert first == again
        results = [await post("retrieve_future", request_id=one["request_id"]) for one in (first, second, again)]
        gone = await http.post("retrieve_future", json={"request_id": f"{session}:nothing"})
        num_steps = server.service._bank._adapters[model_id].num_steps

    assert results[0] == results[2]
    assert "metrics" in results[0]
    assert results[1]["path"].endswith("/weights/b")
    assert (1, 400, 404) == (num_steps, early.status_code, gone.status_code)


@pytest.mark.parametrize(
    ("route", "headers", "body", "status"),
    [
        ("create_session", {"X-API-Key": ""}, b"{}", 401),
        ("create_session", {}, b"{", 400),
        ("create_session", {}, b"[" * 100_000, 400),
        ("create_model", {}, b"{}", 400),
        ("create_model", {}, b'{"session_id": 3}', 400),
        ("asample", {}, b'{"sampling_session_id": "x"}', 404),
        ("forward_backward", {"Content-Type": "application/x-protobuf"}, b"\xff\xff\xff", 400),
        ("forward_backward", {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}, b"no", 400),
        ("forward_backward", {}, b"{}", 400),
        ("weights_info", {}, b'{"tinker_path": "tinker://../x/y"}', 400),
        ("training_runs?limit=x", {}, None, 400),
        ("nothing", {}, b"{}", 404),
    ],
)
async def test_malformed_requests_are_refused(tmp_path, route, headers, body, status):
    """Each has its status, a reason, and leaves the server answering."""
    async with served(tmp_path) as server, httpx.AsyncClient(base_url=f"{server.url}/api/v1") as http:
        every = {"X-API-Key": "tml-a", "Content-Type": "application/json"} | headers
        answer = await http.request("GET" if body is None else "POST", route, headers=every, content=body)
        fine = await http.get("healthz", headers={"X-API-Key": "tml-a"})

    assert (status, 200) == (answer.status_code, fine.status_code), answer.text


async def test_compressed_body_cannot_fill_the_memory(tmp_path):
    """A frame of zeros that unpacks to a gigabyte is refused at the limit."""
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28)) * 4
    headers = {"X-API-Key": "tml-a", "Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
    async with served(tmp_path) as server, httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{server.url}/api/v1/forward_backward", headers=headers, content=bomb)

    assert 413 == answer.status_code


async def test_samples_that_cannot_be_drawn_are_refused_by_name(tmp_path):
    """Before anything is sampled, with the value; the log-probabilities of a prompt's end can be asked alone."""

    def use(server: TinkerServer) -> None:
        created: Any = connect(server).create_sampling_client(base_model="tiny")
        sampler, prompt = created.result(), types.ModelInput.from_ints(TOKENS)
        for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"max_tokens": 0}, {"stop": [""]}):
            params = types.SamplingParams(**{"max_tokens": 2, **wrong})
            with pytest.raises(tinker.BadRequestError, match="cannot be sampled with"):
                sampler.sample(prompt, num_samples=1, sampling_params=params).result()
        with pytest.raises(tinker.BadRequestError, match="outside the model's vocabulary"):
            far = types.ModelInput.from_ints([10**7])
            sampler.sample(far, num_samples=1, sampling_params=types.SamplingParams(max_tokens=1)).result()
        whole, last = (
            sampler.compute_logprobs(prompt, **more).result() for more in ({}, {"prompt_logprobs_last_n": 2})
        )
        assert [None] * 6 == last[:-2]
        assert whole[-2:] == last[-2:]

    async with served(tmp_path) as server:
        await run(use, server)


async def test_unwritable_fileroot_is_refused_at_the_start(tmp_path):
    """With the option, instead of at the first checkpoint."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--fileroot"):
        async with served(tmp_path / "file"):
            pass


async def test_unnamed_checkpoints_go_with_their_model(tmp_path):
    """A loop that makes one in each step fills no disk; the last ones can be sampled from, and none is listed."""

    def use(server: TinkerServer) -> None:
        client = create(connect(server))
        samplers = [client.save_weights_and_get_sampling_client().result() for _ in range(MAX_EPHEMERAL + 3)]
        params = types.SamplingParams(max_tokens=2)
        prompt = types.ModelInput.from_ints(TOKENS)
        assert 2 == len(samplers[-1].sample(prompt, num_samples=1, sampling_params=params).result().sequences[0].tokens)
        with pytest.raises(tinker.RequestFailedError, match="was deleted"):
            samplers[0].sample(prompt, num_samples=1, sampling_params=params).result()
        assert MAX_EPHEMERAL == len([path for path in tmp_path.glob("*/sampler_weights/*") if path.is_dir()])
        assert [] == connect(server).create_rest_client().list_user_checkpoints().result().checkpoints

    async with served(tmp_path) as server:
        await run(use, server)
        assert [] == list(tmp_path.glob("*/sampler_weights/*"))


async def test_silent_session_leaves_the_memory(tmp_path):
    """Its models are unloaded; requests for them say so; its checkpoints stay."""
    async with served(tmp_path) as server:
        service = server.service

        def use() -> str:
            return create(connect(server)).save_state("kept").result().path

        path = await run(use)
        model_id = path.removeprefix("tinker://").split("/")[0]
        await service.finish_session(service.session(model_id.partition(":")[0], service.authenticate("tml-one")))
        async with httpx.AsyncClient(base_url=f"{server.url}/api/v1", headers={"X-API-Key": "tml-one"}) as http:
            step = await http.post("optim_step", json={"model_id": model_id, "seq_id": 2, "adam_params": {}})
            beat = await http.post("session_heartbeat", json={"session_id": model_id.partition(":")[0]})
            info = await http.post("weights_info", json={"tinker_path": path})

    assert (404, 410, 200) == (step.status_code, beat.status_code, info.status_code), step.text


def test_open_address_without_key_is_refused():
    """Anybody could train there."""
    with pytest.raises(ConfigError, match="set --api-key"):
        check_access(TinkerConfig(model="tiny", host="0.0.0.0"))


async def test_rewarded_tokens_become_probable(tmp_path):
    """A loop of the SDK on its own: sample, reward even tokens, importance sampling, step. The reward rises."""

    def use(server: TinkerServer) -> list[float]:
        client = create(connect(server), rank=8)
        prompt, rewards = types.ModelInput.from_ints(TOKENS[:2]), []
        for step in range(40):
            sampler: Any = client.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=4, seed=step, stop=[])
            found = sampler.sample(prompt, num_samples=24, sampling_params=params).result().sequences
            scores = [[float(token % 2 == 0) for token in one.tokens] for one in found]
            rewards.append(float(np.mean(scores)))
            data = []
            for one, score in zip(found, scores, strict=True):
                whole = [*TOKENS[:2], *map(int, one.tokens)]
                inputs: Any = {
                    "target_tokens": whole[1:],
                    "logprobs": [0.0, *map(float, one.logprobs)],
                    "advantages": [0.0, *(value - rewards[-1] for value in score)],
                }
                data.append(types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs))
            passed = client.forward_backward(data, "importance_sampling")
            client.optim_step(types.AdamParams(learning_rate=0.005)).result()
            passed.result()
        return rewards

    async with served(tmp_path, max_samplers=2) as server:
        rewards = await run(use, server)

    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2, rewards
