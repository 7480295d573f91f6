"""Inference by experiment and trial from Python: at home, through a service, and from a service in another process."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import anyio
import httpx
import pytest
from attrs import evolve
from tests.run.trained import ENGINE, NAME, QUESTION, greedy_text, serving, train
from transformers import AutoTokenizer

from areal_actors import RemoteSGLangEngine
from areal_actors.errors import ConfigError, InvalidRequest, ModelError, Unauthorized, Unavailable
from areal_actors.run.inference import InferenceConfig, open_inference
from areal_actors.workflows.engine import GenerationConfig, ModelRequest

EXPERIMENT, TRIAL = NAME.split("/")
AT_HOME = InferenceConfig(engine=ENGINE)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run has trained a model."""
    root = tmp_path_factory.mktemp("runs")
    result = train(root, NAME)
    assert result.exit_code == 0, result.output
    return root


@pytest.mark.anyio
async def test_remote_engine_example_runs(root: Path, monkeypatch: pytest.MonkeyPatch):
    """As people write it: initialize at once, await an answer, read its text; ``runs`` is where it looks."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.chdir(root.parent)
    (root.parent / "runs").unlink(missing_ok=True)
    (root.parent / "runs").symlink_to(root)

    engine = RemoteSGLangEngine()
    engine.initialize(experiment_name="my-model", trial_name="2025-10-23-run-1", user="username")
    response = await engine.agenerate(prompt="What is reinforcement learning?")
    await engine.aclose()
    await engine.aclose()

    assert isinstance(response.text, str)
    assert (NAME, response.output_len) == (response.model, len(response.output_tokens or ()))
    assert [] == _engines_left()


@pytest.mark.anyio
async def test_remote_engine_answers_alike_from_disk_and_service(root: Path):
    """Greedy text is that of transformers in both places, from a question, from messages, and from ids."""
    expected = greedy_text(root / NAME / "weights")
    tokenizer = AutoTokenizer.from_pretrained(root / NAME / "weights")
    messages = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    greedy = GenerationConfig(greedy=True, max_new_tokens=12)
    async with open_inference("tiny", serving(root)) as inference:
        there = RemoteSGLangEngine().initialize(
            experiment_name=EXPERIMENT,
            trial_name=TRIAL,
            user="username",
            base_url=inference.endpoint.base_url,
            api_key=inference.endpoint.admin_key,
        )
        here = RemoteSGLangEngine(AT_HOME).initialize(experiment_name=EXPERIMENT, trial_name=TRIAL, fileroot=root)
        async with here, there:
            answers = [
                [
                    await engine.agenerate(QUESTION, greedy=True, max_new_tokens=12),
                    await engine.agenerate(messages, gconfig=greedy),
                    await engine.agenerate(input_ids=ids, gconfig=greedy),
                    await engine.agenerate(ModelRequest(input_ids=ids, gconfig=greedy)),
                ]
                for engine in (here, there)
            ]

    assert {expected} == {answer.text for row in answers for answer in row}
    assert [len(ids)] * 4 == [answer.input_len for answer in answers[0]] == [answer.input_len for answer in answers[1]]
    assert all(answer.output_tokens and answer.output_logprobs for answer in answers[0])
    assert all(answer.output_tokens is None for answer in answers[1])


@pytest.mark.anyio
async def test_remote_engine_opens_once_for_concurrent_requests(root: Path):
    """The first ones wait for one engine; a closed one opens again when it is asked again."""
    engine = RemoteSGLangEngine(AT_HOME).initialize(experiment_name=EXPERIMENT, fileroot=root)
    async with engine:
        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(lambda: engine.agenerate(QUESTION, max_new_tokens=4))
        num_open = len(_engine_threads())
    num_closed = len(_engines_left())
    async with engine:
        again = await engine.agenerate(QUESTION, max_new_tokens=4)

    assert (1, 0, NAME) == (num_open, num_closed, again.model)


def test_remote_engine_works_in_several_event_loops(root: Path):
    """What a loop opened ends with it, closed or not; the next loop opens its own."""
    engine = RemoteSGLangEngine(AT_HOME).initialize(experiment_name=EXPERIMENT, fileroot=root)
    first = asyncio.run(engine.agenerate(QUESTION, greedy=True, max_new_tokens=4))
    between = _engines_left()
    second = asyncio.run(engine.agenerate(QUESTION, greedy=True, max_new_tokens=4))
    engine.destroy()

    assert (first.text, []) == (second.text, between)


@pytest.mark.anyio
async def test_remote_engine_names_mistakes(root: Path):
    """Names, keys, addresses, prompts and settings, each by the error that fits."""
    engine = RemoteSGLangEngine(AT_HOME)
    with pytest.raises(ConfigError, match="initialize"):
        await engine.agenerate("hello")
    with pytest.raises(ModelError, match=f"did you mean {NAME}"):
        engine.initialize(experiment_name=EXPERIMENT, trial_name="2025-10-23-run-2", fileroot=root)
    with pytest.raises(ConfigError, match="one of them"):
        engine.initialize(experiment_name=EXPERIMENT, base_url="http://127.0.0.1:1/v1", fileroot=root)
    engine.initialize(experiment_name=EXPERIMENT, fileroot=root)
    with pytest.raises(InvalidRequest, match="one of the two"):
        await engine.agenerate("hello", input_ids=[1])
    with pytest.raises(InvalidRequest, match="temprature"):
        await engine.agenerate("hello", temprature=1)
    engine.initialize(
        experiment_name=EXPERIMENT, trial_name=TRIAL, environment={"OPENAI_BASE_URL": "http://127.0.0.1:1"}
    )
    with pytest.raises(Unavailable, match="check that the service runs"):
        await engine.agenerate("hello")
    async with open_inference("tiny", serving(root)) as inference:
        url = inference.endpoint.base_url
        async with engine.initialize(experiment_name="who", trial_name="knows", base_url=url, api_key="sk-wrong"):
            with pytest.raises(ModelError, match="does not offer"):
                await engine.agenerate("hello")
    assert Unauthorized.status == 401


@pytest.mark.anyio
async def test_remote_engine_sends_no_key_without_one(root: Path):
    """With any placeholder, too; a service that needs one says so. The policy still needs a session."""
    settings = serving(root)
    opened = evolve(settings, proxy=evolve(settings.proxy, open_sessions=True))
    async with open_inference("tiny", opened) as inference:
        url = inference.endpoint.base_url
        for api_key in (None, "DUMMY"):
            engine = RemoteSGLangEngine()
            engine.initialize(
                experiment_name=EXPERIMENT, trial_name=TRIAL, base_url=url, api_key=api_key, environment={}
            )
            async with engine:
                assert NAME == (await engine.agenerate(QUESTION, max_new_tokens=4)).model
        async with httpx.AsyncClient() as http:
            body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
            assert 401 == (await http.post(f"{url}/chat/completions", json=body)).status_code
    async with open_inference("tiny", settings) as inference:
        engine = RemoteSGLangEngine()
        engine.initialize(
            experiment_name=EXPERIMENT, trial_name=TRIAL, base_url=inference.endpoint.base_url, environment={}
        )
        async with engine:
            with pytest.raises(ModelError, match=r"does not offer the model .* without a key \(api_key\)"):
                await engine.agenerate(QUESTION)


def _engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "areal-torch-engine"]


def _engines_left() -> list[threading.Thread]:
    """Those that do not end by themselves, as a closed engine's does in its own time."""
    for thread in _engine_threads():
        thread.join(5)
    return _engine_threads()
