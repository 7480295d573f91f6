"""Trained models by name over HTTP: one base URL, and ``model`` decides whose weights answer."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI
from tests.run.trained import NAME, QUESTION, greedy_text, serving, train

from areal_actors.messages import CollectSession
from areal_actors.run.inference import open_inference

pytestmark = [
    pytest.mark.anyio,
    # At [DONE] the SDK leaves its generators to the garbage collector, of which trio warns.
    pytest.mark.filterwarnings("ignore:Async generator '(httpx|openai|httpcore):ResourceWarning"),
]

OTHER = "my-model/second"
ASK = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two runs have trained a model each."""
    root = tmp_path_factory.mktemp("runs")
    for name, seed in ((NAME, 1), (OTHER, 7)):
        result = train(root, name, f"seed={seed}", "trainer.optimizer.learning_rate=0.05")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout.splitlines()[-1])["model"] == name
    return root


async def test_model_name_selects_weights(root: Path):
    """The real SDK, streamed and in one piece: greedy text is that of transformers; other names are the policy's."""
    expected = greedy_text(root / NAME / "weights")
    async with open_inference("tiny", serving(root)) as inference, inference.session() as session:
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            options = {"messages": ASK, "temperature": 0, "max_tokens": 12}
            whole = await client.chat.completions.create(model=NAME, **options)
            stream = await client.chat.completions.create(model=NAME, stream=True, **options)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            policy = await client.chat.completions.create(model="some/model", **options)
            names = [model.id async for model in client.models.list()]
        record = await inference.sessions.ask(CollectSession(session=session.id))

    assert expected == whole.choices[0].message.content == "".join(parts)
    assert (NAME, "some/model") == (whole.model, policy.model)
    assert expected != policy.choices[0].message.content
    assert [NAME, OTHER] == names[1:]
    assert [policy.id] == [interaction.id for interaction in record.interactions]


async def test_session_key_is_accepted_for_trained_models(root: Path):
    """A session's key and the admin key do, no key does not; models are not listed for strangers."""
    async with open_inference("tiny", serving(root)) as inference, inference.session() as session:
        url, admin = inference.endpoint.base_url, inference.endpoint.admin_key
        body = {"model": NAME, "messages": ASK, "max_tokens": 2}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            answers = {
                name: await http.post(f"{url}/chat/completions", json=body, headers=headers)
                for name, headers in (
                    ("session", {"authorization": f"Bearer {session.api_key}"}),
                    ("admin", {"authorization": f"Bearer {admin}"}),
                    ("stranger", {"authorization": "Bearer sk-stranger"}),
                    ("no key", {}),
                )
            }
            listed = (await http.get(f"{url}/models")).json()["data"]

    assert {"session": 200, "admin": 200, "stranger": 401, "no key": 401} == {
        name: answer.status_code for name, answer in answers.items()
    }
    assert 1 == len(listed)


async def test_unreadable_weights_are_refused(root: Path, tmp_path: Path):
    """422 with what is wrong, again at each request; the policy and the other models go on."""
    for name in (NAME, "broken/weights"):
        target = tmp_path / name / "weights"
        target.mkdir(parents=True)
        for file in (root / NAME / "weights").iterdir():
            (target / file.name).write_bytes(file.read_bytes())
    (tmp_path / "broken/weights/weights/model.safetensors").write_bytes(b"not tensors")
    async with (
        open_inference("tiny", serving(tmp_path)) as inference,
        inference.session() as session,
        AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client,
    ):
        refusals = []
        for is_stream in (False, True):
            with pytest.raises(APIStatusError) as caught:
                await client.chat.completions.create(
                    model="broken/weights", messages=ASK, max_tokens=2, stream=is_stream
                )
            refusals.append(caught.value)
        good = await client.chat.completions.create(model=NAME, messages=ASK, max_tokens=2)
        policy = await client.chat.completions.create(model="policy", messages=ASK, max_tokens=2)

    assert [422, 422] == [refusal.status_code for refusal in refusals]
    assert "broken/weights cannot be loaded" in refusals[0].message
    assert 2 == len(good.choices) + len(policy.choices)


async def test_disconnected_client_releases_model(root: Path):
    """Hanging up in the middle of a stream frees the place for another model."""
    async with (
        open_inference("tiny", serving(root)) as inference,
        inference.session() as session,
        AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=60) as client,
    ):
        stream = await client.chat.completions.create(model=NAME, messages=ASK, stream=True, max_tokens=200)
        await anext(aiter(stream))
        await stream.close()
        with anyio.fail_after(30):
            other = await client.chat.completions.create(model=OTHER, messages=ASK, max_tokens=2)

    assert OTHER == other.model
