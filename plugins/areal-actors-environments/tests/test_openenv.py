"""Agents in environments of OpenEnv: the form of actions, and episodes with a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import anyio
import pytest
from click.testing import CliRunner
from tools.clients.staging import open_stage

from areal_actors.__main__ import cli
from areal_actors.client import OpenAIProxyClient, create_agent_http_client
from areal_actors.dashboard import RunDirectory
from areal_actors.errors import EpisodeError, WorkflowError
from areal_actors.testing.engines import EchoEngine
from areal_actors.workflows import EpisodeContext, run_agent, workflow_context
from areal_actors.workflows.agents import Injected
from areal_actors_environments.openenv import Actions, Form, OpenEnvAgent, choose_form, describe, parse_call, seeds

HERE = Path(__file__).parent
TINY = HERE.parents[2] / "examples" / "tiny.yaml"
TEXT = {"title": "Say", "properties": {"metadata": {}, "text": {"type": "string"}}, "required": ["text"]}
NUMBER = {"title": "Guess", "properties": {"metadata": {}, "number": {"type": "integer"}}, "required": ["number"]}
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {"at": {}}}}

installed = pytest.mark.skipif(
    find_spec("openenv") is None,
    reason="needs openenv: pip install 'areal-actors-environments[openenv]', or nox -s openenv",
)

# ------------------------------------------------------------------------------------------------- forms of actions


def test_openenv_uses_text_for_one_text_and_tools_otherwise():
    """Unless tools are wanted; fields that every action has are left out."""
    assert Form(text_field="text") == choose_form(TEXT, Actions.AUTO)
    (step,) = choose_form(NUMBER, Actions.AUTO).tools
    (spoken,) = choose_form(TEXT, Actions.TOOLS).tools

    assert "step" == step["function"]["name"]
    wanted = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
    assert wanted == step["function"]["parameters"]
    assert ["text"] == spoken["function"]["parameters"]["required"]
    with pytest.raises(ValueError, match="number, and is not one text"):
        choose_form(NUMBER, Actions.TEXT)


def test_openenv_offers_tools_of_mcp_servers():
    """Their calls become one action of the server; those of ``step`` are the action."""
    form = choose_form({"title": "CallToolAction"}, Actions.AUTO, [TOOL])
    called = parse_call({"function": {"name": "look", "arguments": '{"at": 1}'}}, form)

    assert {"type": "call_tool", "tool_name": "look", "arguments": {"at": 1}} == called
    step = choose_form(NUMBER, Actions.AUTO)
    assert {"number": 3} == parse_call({"function": {"name": "step", "arguments": '{"number": 3}'}}, step)


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [("jump", "{}", "no tool jump; there are step"), ("step", "[1]", "not an object"), ("step", "{", "Expecting")],
)
def test_openenv_explains_calls_that_do_not_fit(name, arguments, complaint):
    """In words for the model."""
    with pytest.raises(ValueError, match=complaint):
        parse_call({"function": {"name": name, "arguments": arguments}}, choose_form(NUMBER, Actions.AUTO))


def test_openenv_describes_observations():
    """JSON elsewhere."""
    assert "Guess." == describe({"message": "Guess.", "metadata": {}, "hint": None})
    assert '{"a": 1, "b": "é"}' == describe({"a": 1, "b": "é"})
    assert "[1]" == describe({"board": [1]})


def test_openenv_problems_are_seeds():
    """Another first seed makes others."""
    assert [{"seed": 5}, {"seed": 6}] == list(seeds(2, 5))


@pytest.mark.skipif(find_spec("openenv") is not None, reason="openenv is installed")
def test_an_absent_package_is_named():
    """Before the run, with the line that installs it."""
    with pytest.raises(WorkflowError, match=r"pip install 'areal-actors-environments\[openenv\]'"):
        OpenEnvAgent(url="http://127.0.0.1:1")


# --------------------------------------------------------------------------------------------------------- episodes


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """The addresses of servers whose actions are a number, a text, and calls of MCP tools."""
    urls, processes = {}, []
    try:
        for kind in ("tools", "text", "mcp"):
            command = [sys.executable, str(HERE / "openenv_server.py"), kind]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            processes.append(process)
            urls[kind] = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


async def play(agent: OpenEnvAgent, answers: list[str], seed: int = 7):
    """The reward of one episode in which the model gives ``answers``, its record, and what it logged."""
    left = list(answers)

    def create_engine(tokenizer):
        def speak(_):
            return [int(i) for i in tokenizer.encode(left.pop(0) + "<|im_end|>", add_special_tokens=False)]

        return EchoEngine(speak, vocab_size=len(tokenizer), has_grammars=True)

    async with open_stage(create_engine) as stage, create_agent_http_client() as http_client:
        endpoint = stage.endpoint
        async with OpenAIProxyClient(endpoint.url, admin_key=endpoint.admin_key, task_id="task") as session:
            injected = Injected(base_url=session.base_url, api_key=session.api_key, http_client=http_client)
            with workflow_context.enter(EpisodeContext(task_id="task")):
                reward = await run_agent(agent, {"seed": seed}, injected)
                logged = dict(workflow_context.logged())
            return reward.last, await stage.record(session.session_id), logged


def guess(number: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'step', 'arguments': {'number': number}})}\n</tool_call>"


def on_asyncio(function):
    """OpenEnv's client runs on no other event loop."""
    return pytest.mark.anyio(pytest.mark.parametrize("anyio_backend", ["asyncio"])(function))


@installed
@on_asyncio
async def test_openenv_reward_is_the_sum_of_steps(servers):
    """Two wrong guesses and a right one, one after the other in one conversation; a call that does not fit is told."""
    answers = [guess(3), guess("seven"), guess(9), guess(7)]
    reward, record, logged = await play(OpenEnvAgent(url=servers["tools"]), answers)

    assert 0.8 == pytest.approx(reward)
    assert {"environment_steps": 4.0, "is_done": 1.0} == logged
    assert [None, *[turn.id for turn in record.interactions[:-1]]] == [turn.parent for turn in record.interactions]
    told = [message.content for turn in record.interactions for message in turn.messages]
    assert any("Error" in text and "VALIDATION_ERROR" in text for text in told)


@installed
@on_asyncio
async def test_openenv_accepts_text_as_action(servers):
    """What the model says is the field of the action; after the last step, the reward so far counts."""
    agent = OpenEnvAgent(url=servers["text"], max_steps=2, system_prompt="Play.")
    reward, record, logged = await play(agent, ["Is it 3?", "I say 5."])

    assert -0.2 == pytest.approx(reward)
    assert {"environment_steps": 2.0, "is_done": 0.0} == logged
    assert ["Play.", "Guess a number from 0 to 9."] == [one.content for one in record.interactions[0].messages]


@installed
@on_asyncio
async def test_openenv_calls_tools_of_an_mcp_server(servers):
    """The model is offered what the server lists, and a call that its schema refuses is told."""
    answers = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'number': number}})}\n</tool_call>"
        for name, number in (("guess", 3), ("guess", "seven"), ("look", 7), ("guess", 7))
    ]
    reward, record, logged = await play(OpenEnvAgent(url=servers["mcp"]), answers)

    assert 0.9 == pytest.approx(reward)
    assert 1.0 == logged["is_done"]
    told = [message.content for turn in record.interactions for message in turn.messages]
    assert any("higher" in text for text in told)
    assert sum("error" in text.lower() for text in told) >= 2


@installed
@on_asyncio
@pytest.mark.parametrize(
    ("url", "answers", "complaint"),
    [
        ("http://127.0.0.1:9", [], r"environment at http://127.0.0.1:9 failed"),
        ("tools", [guess(13)], r"failed: RuntimeError: .*the game is broken"),
    ],
)
async def test_openenv_server_failure_fails_the_episode(servers, url, answers, complaint):
    """One that is not there, and one that raises."""
    with pytest.raises(EpisodeError, match=complaint):
        await play(OpenEnvAgent(url=servers.get(url, url)), answers)


@installed
def test_on_trio_the_way_out_is_named(servers):
    """It runs there in child processes."""
    with pytest.raises(EpisodeError, match=r"rollout\.openai\.mode: subprocess"):
        anyio.run(OpenEnvAgent(url=servers["text"]).run, {}, backend="trio")


@installed
@pytest.mark.parametrize("mode", ["inline", "subprocess"])
def test_a_run_trains_in_an_environment(servers, tmp_path, mode):
    """It is an agent as any other, with its server as an argument."""
    agent = "areal_actors_environments.openenv:OpenEnvAgent"
    arguments = f"{{url: '{servers['text']}', max_steps: 2, max_tokens: 4}}"
    small = ("total_steps=2", "batch_size=2", "rollout.group_size=2", "eval_dataset=null", "engine.num_threads=1")
    run = (f"rollout.workflow={agent}", f"rollout.workflow_kwargs={arguments}", f"rollout.openai.mode={mode}")
    data = "dataset={python: 'areal_actors_environments.openenv:seeds', size: 10, seed: 0}"
    command = ["train", str(TINY), *small, *run, data, "logging.trackers=[]", "--run-dir", str(tmp_path / "run")]
    result = CliRunner().invoke(cli, command)
    assert 0 == result.exit_code, result.output

    *_, step = (json.loads(line) for line in RunDirectory(path=tmp_path / "run").metrics.read_text().splitlines())
    assert 4 == step["rollout/environment_steps/count"]
