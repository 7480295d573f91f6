"""Environments of the real verifiers: their rewards, failures, boxes and seats, in episodes and in runs.

``nox -s verifiers`` installs it, with an openai that the rest of the suite does not have.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import frozen
from click.testing import CliRunner, Result
from tools.clients.staging import open_stage

from areal_actors.cli import cli
from areal_actors.client import OpenAIProxyClient
from areal_actors.config import create_config
from areal_actors.dashboard import RunDirectory
from areal_actors.datasets import load_problems
from areal_actors.errors import DatasetError, EpisodeError, SandboxError, WorkflowError
from areal_actors.lib.references import import_reference
from areal_actors.run.job import prepare_agent
from areal_actors.sandbox import SandboxConfig, create_sandbox
from areal_actors.testing.engines import EchoEngine
from areal_actors.workflows import EpisodeContext, workflow_context
from areal_actors_environments.verifiers import VerifiersAgent

pytest.importorskip(
    "verifiers.v1",
    reason="needs verifiers: pip install 'areal-actors-environments[verifiers]', or nox -s verifiers",
    exc_type=ImportError,
)

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"
TASKS = HERE / "tasks.py"
SMALL = ("engine.max_concurrent=8", "engine.num_threads=1", "trainer.dtype=float32", "logging.trackers=[]")
CHAT = "chat"


def can_open(backend: str) -> bool:
    if backend != "none" and find_spec("areal_actors_sandbox") is None:
        return False
    config = SandboxConfig(backend=create_config_kind(backend))
    try:
        create_sandbox(config.backend).check(config)
    except SandboxError:
        return False
    return True


def create_config_kind(backend: str) -> Any:
    return create_config(settings(sandbox=backend)).rollout.openai.sandbox.backend


def settings(
    taskset: Any = "WordsTaskset",
    harness: Any = CHAT,
    *,
    sandbox: Any = "none",
    env: str = "default",
    options: Any = None,
) -> dict[str, Any]:
    def named(plugin: Any) -> Any:
        if isinstance(plugin, dict):
            return plugin | {"id": named(plugin["id"])}
        return f"{TASKS}:{plugin}" if isinstance(plugin, str) and plugin[0].isupper() else plugin

    environment = {"taskset": named(taskset), "harness": named(harness)}
    environment["env"] = {"id": named(env), "options": options or {}}
    return {
        "experiment_name": "environments",
        "total_steps": 1,
        "model": "tiny",
        "rollout": {"workflow": {"verifiers": environment}, "openai": {"sandbox": sandbox}},
    }


@frozen(kw_only=True)
class Played:
    """One episode: what the agent returned or raised, and its session."""

    reward: Any
    error: EpisodeError | None
    logged: dict[str, float]
    turns: tuple[Any, ...]


@asynccontextmanager
async def open_played(
    configured: dict[str, Any], say: Callable[[str], str], tmp_path: Path
) -> AsyncIterator[Callable[..., Any]]:
    """Yield a function that plays a problem by its number, through the real proxy; the model says what ``say`` says."""

    def create_engine(tokenizer: Any) -> EchoEngine:
        def speak(prompt: Any) -> list[int]:
            text = say(tokenizer.decode(prompt.tolist())) + "<|im_end|>"
            return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]

        return EchoEngine(speak, vocab_size=len(tokenizer), has_grammars=True)

    config = create_config(configured)
    problems = load_problems(config.training_sets[""], import_reference=import_reference).all()
    async with open_stage(create_engine) as stage, prepare_agent(config.rollout, logs=tmp_path) as agent:
        assert isinstance(agent, VerifiersAgent)

        async def play(number: int = 0) -> Played:
            endpoint, reward, error = stage.endpoint, None, None
            async with OpenAIProxyClient(endpoint.url, admin_key=endpoint.admin_key, task_id="task") as session:
                with workflow_context.enter(EpisodeContext(task_id="task")):
                    try:
                        data = json.loads(json.dumps(problems[number].data))
                        reward = await agent.run(data, base_url=session.base_url, api_key=session.api_key)
                    except EpisodeError as failure:
                        error = failure
                    logged = dict(workflow_context.logged())
                record = await stage.record(session.session_id)
            return Played(reward=reward, error=error, logged=logged, turns=tuple(record.interactions))

        yield play


def is_running(pid: str) -> bool:
    stat = Path("/proc", pid, "stat")
    # One that was killed may wait for process 1 to collect it.
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def train(run_dir: Path, *overrides: str) -> Result:
    command = ["train", str(EXAMPLES / "verifiers.yaml"), *SMALL, *overrides, "--run-dir", str(run_dir)]
    return CliRunner().invoke(cli, command)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def anyio_test(function: Any) -> Any:
    """On asyncio: verifiers runs on no other event loop."""
    return pytest.mark.anyio(pytest.mark.parametrize("anyio_backend", ["asyncio"])(function))


# ----------------------------------------------------------------------------------------------------- rewards


@anyio_test
async def test_the_reward_is_the_weighted_total_of_the_rubric(tmp_path: Path) -> None:
    """Each function is logged as it returned, without its weight; what the harness says goes to the session."""
    answers = {"red": "red", "green": "It is not what was asked for."}

    def say(prompt: str) -> str:
        return next((said for word, said in answers.items() if f"Say {word}" in prompt), "")

    async with open_played(settings(), say, tmp_path) as play:
        right, wrong = await play(0), await play(1)

    assert (2.5, 0.0) == (right.reward, wrong.reward)
    assert {"reward.is_right": 1.0, "reward.is_short": 1.0, "metric.length": 3.0} == right.logged
    assert {"reward.is_right": 0.0, "reward.is_short": 0.0, "metric.length": 29.0} == wrong.logged
    assert [["Say red."]] == [[message.content for message in turn.messages] for turn in right.turns]


@anyio_test
async def test_each_seat_of_an_environment_is_a_role_with_its_own_reward(tmp_path: Path) -> None:
    """Of two agents in one session, each has the reward of its trace on its last completion."""
    async with open_played(settings("LoneTaskset", env="Pair"), lambda _: "red", tmp_path) as play:
        played = await play()
    first, second = played.turns

    assert ("first", "second") == (first.tag, second.tag)
    assert {first.id: 1.0, second.id: -1.0} == played.reward
    assert {"first.reward.outcome": 1.0, "second.reward.outcome": -1.0} == played.logged


@anyio_test
async def test_a_seat_with_a_client_of_its_own_is_no_part_of_the_session(tmp_path: Path) -> None:
    """Here nothing listens where its model would be."""
    client = {"type": "eval", "base_url": "http://127.0.0.1:9/v1", "api_key_var": "NO_SUCH_KEY"}
    configured = settings("LoneTaskset", env="Pair", options={"second": {"client": client}})
    async with open_played(configured, lambda _: "red", tmp_path) as play:
        played = await play()

    assert ["first"] == [turn.tag for turn in played.turns]
    with pytest.raises(EpisodeError, match="ProviderError"):
        raise played.error


@anyio_test
async def test_episodes_of_one_environment_run_at_the_same_time(tmp_path: Path) -> None:
    """Each has the reward of its own answer, and verifiers keeps no client of a session that is over."""
    import verifiers.v1.interception.server as module

    servers = []
    started = module.InterceptionServer.start

    async def start(server: Any) -> None:
        servers.append(server)
        await started(server)

    module.InterceptionServer.start = start
    try:
        async with open_played(settings(), lambda prompt: "red" * ("red" in prompt), tmp_path) as play:
            played: dict[int, Played] = {}

            async def remember(number: int) -> None:
                played[number] = await play(number % 3)

            async with anyio.create_task_group() as tasks:
                for number in range(12):
                    tasks.start_soon(remember, number)
            kept = [len(server.clients) for server in servers]
    finally:
        module.InterceptionServer.start = started

    assert [2.5 if number % 3 == 0 else 0.5 for number in range(12)] == [played[n].reward for n in range(12)]
    assert [0] == kept


# ---------------------------------------------------------------------------------------------------- failures


@anyio_test
@pytest.mark.parametrize(
    ("rubric", "complaint"),
    [
        ("raises", "ZeroDivisionError: the grader divides by nothing"),
        ("is_nan", "returned nan as reward.is_right"),
        ("hangs", "has no value of is_right.*ended with scoring_timeout"),
    ],
)
async def test_a_rubric_that_fails_fails_its_episode(tmp_path: Path, rubric: str, complaint: str) -> None:
    """An error has its traceback, with the line of the rubric."""
    taskset = {"id": "WordsTaskset", "options": {"rubric": rubric}}
    options = {"agent": {"timeout": {"scoring": 0.2}}}
    async with open_played(settings(taskset, options=options), lambda _: "red", tmp_path) as play:
        played = await play()

    assert played.reward is None
    assert played.error is not None
    with pytest.raises(EpisodeError, match=f"(?s){complaint}"):
        raise played.error
    assert (rubric == "raises") == (
        'raise ZeroDivisionError("the grader divides by nothing")' in played.error.traceback
    )


@anyio_test
async def test_a_harness_that_never_calls_the_model_is_reported(tmp_path: Path) -> None:
    """With the end of its output."""
    async with open_played(settings(harness="SilentHarness"), lambda _: "red", tmp_path) as play:
        played = await play()

    with pytest.raises(EpisodeError, match=r"(?s)never called the model.*agent_completed.*no model is called"):
        raise played.error


@anyio_test
@pytest.mark.parametrize("ends", ["its own limit", "the episode"])
async def test_a_harness_that_hangs_is_ended_with_its_processes(tmp_path: Path, ends: str) -> None:
    """By the limit of its stage, or when the episode is cancelled; nothing that it started goes on."""
    harness = {"id": "ScriptHarness", "options": {"script": f"sleep 987 & echo $! > {tmp_path}/pid; wait"}}
    options = {"agent": {"timeout": {"rollout": 2.0}}} if ends == "its own limit" else {}
    configured = settings(harness={**harness, "id": "FreeScriptHarness"}, options=options)
    async with open_played(configured, lambda _: "red", tmp_path) as play:
        with anyio.move_on_after(2.0 if not options else 60.0) as scope:
            played = await play()

    assert not is_running((tmp_path / "pid").read_text().strip())
    assert bool(options) != scope.cancelled_caught
    if options:
        with pytest.raises(EpisodeError, match=r"never called the model.*agent_timeout"):
            raise played.error


# ---------------------------------------------------------------------------------------------------- sandbox


boxed = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bubblewrap runs on Linux")


@boxed
@anyio_test
async def test_a_harness_that_needs_a_container_runs_in_a_box(tmp_path: Path) -> None:
    """It reaches the model and nothing else, finds the task's files, and leaves the one that the rubric reads."""
    if not can_open("bubblewrap"):
        pytest.skip("bubblewrap opens no sandbox here")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    script = (
        "wc -l < given/words.txt > count.txt; python3 ask.py && "
        f"! cat {secret} && ! env | grep AREAL && echo done > done.txt"
    )
    harness = {"id": "ScriptHarness", "options": {"script": script}}
    async with open_played(settings("FileTaskset", harness, sandbox="bubblewrap"), lambda _: "red", tmp_path) as play:
        played = await play()

    assert played.error is None
    assert 1.0 == played.reward
    assert 1 == len(played.turns)


@boxed
@anyio_test
async def test_the_bash_harness_runs_commands_of_the_model_in_a_box(tmp_path: Path) -> None:
    """Without a network: verifiers' program runs with the packages of this environment."""
    if not can_open("bubblewrap"):
        pytest.skip("bubblewrap opens no sandbox here")
    command = {"name": "bash", "arguments": {"command": "wc -l < given/words.txt | tee count.txt"}}

    def say(prompt: str) -> str:
        return "There are 1000." if "tool_response" in prompt else f"<tool_call>\n{json.dumps(command)}\n</tool_call>"

    async with open_played(settings("FileTaskset", "bash", sandbox="bubblewrap"), say, tmp_path) as play:
        played = await play()

    assert played.error is None
    assert 1.0 == played.reward
    assert 2 == len(played.turns)
    assert played.turns[0].id == played.turns[1].parent


@anyio_test
@pytest.mark.parametrize("backend", ["none", pytest.param("bubblewrap", marks=boxed)])
async def test_a_box_keeps_the_contract_of_a_runtime(tmp_path: Path, backend: str) -> None:
    """Files of any size, limits, statuses and processes in the background, for tasks and rubrics."""
    if not can_open(backend):
        pytest.skip("bubblewrap opens no sandbox here")
    async with open_played(settings("ToolboxTaskset", sandbox=backend), lambda _: "red", tmp_path) as play:
        played = await play()

    assert played.error is None
    assert {1.0} == set(played.logged.values())
    assert 7.0 == played.reward


@anyio_test
async def test_a_program_whose_packages_are_missing_is_named(tmp_path: Path) -> None:
    """A box without a network cannot download them."""
    if not can_open("bubblewrap"):
        pytest.skip("bubblewrap opens no sandbox here")
    harness = {"id": "mini-swe-agent", "options": {"version": "0.0.1"}}
    async with open_played(settings("WordsTaskset", harness, sandbox="bubblewrap"), lambda _: "", tmp_path) as play:
        played = await play()

    with pytest.raises(EpisodeError, match=r"mini-swe-agent==0.0.1.*install them here, or set .*network: host"):
        raise played.error


@anyio_test
async def test_the_null_harness_runs_without_a_sandbox(tmp_path: Path) -> None:
    """``harness: null``, with or without quotes."""
    async with open_played(settings(harness=None), lambda _: "red", tmp_path) as play:
        played = await play()

    assert (2.5, None) == (played.reward, played.error)


# ----------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("configured", "complaint"),
    [
        (settings("no-such-taskset"), "taskset 'no-such-taskset' not found"),
        (settings({"id": "WordsTaskset", "options": {"spilt": "test"}}), "spilt: .*did you mean split"),
        (settings(harness="no-such-harness"), "harness 'no-such-harness' not found"),
        (settings(harness="WordsTaskset"), "is not a subclass of verifiers' Harness"),
        (settings("SilentHarness"), "is not a subclass of verifiers' Taskset"),
        (settings(harness={"id": "bash", "options": {"edits": True}}), "edits: .*did you mean edit"),
        (settings(harness="ScriptHarness"), "needs a container; set rollout.openai.sandbox: bubblewrap"),
        (settings(options={"agent": {"max_turn": 1}}), r"agent.max_turn"),
        (settings(options={"interception": {}}), "set interception, which the run sets itself"),
        (settings(harness={"id": "default", "options": {"edit": True}}), "options and no id"),
    ],
)
def test_verifiers_settings_that_do_not_fit_are_refused_before_the_run(
    tmp_path: Path, configured: dict[str, Any], complaint: str
) -> None:
    """With the nearest name, or the setting that helps."""
    with pytest.raises(WorkflowError, match=complaint):
        prepare_agent(create_config(configured).rollout, logs=tmp_path)


def test_on_trio_the_way_out_is_named(tmp_path: Path) -> None:
    """It runs there in child processes."""

    async def enter() -> None:
        async with prepare_agent(create_config(settings()).rollout, logs=tmp_path):
            pass

    with pytest.raises(WorkflowError, match=r"rollout\.openai\.mode: subprocess"):
        anyio.run(enter, backend="trio")


def load(**dataset: Any) -> Any:
    config = create_config(settings() | {"dataset": dataset})
    return load_problems(config.training_sets[""], import_reference=import_reference)


def test_problems_are_the_tasks_of_the_taskset() -> None:
    """All of one that ends, as many as are asked for of one that does not, and those of a split."""
    reference = f"{TASKS}:WordsTaskset"
    endless = f"{TASKS}:EndlessTaskset"

    default = load_problems(create_config(settings()).training_sets[""], import_reference=import_reference).all()
    assert [f"Say {word}." for word in ("red", "green", "blue")] == [one.data["task"]["prompt"] for one in default]
    assert 1 == len(load(verifiers={"id": reference, "options": {"split": "test"}}))
    assert ["Say 5.", "Say 6."] == [
        one.data["task"]["prompt"] for one in load(verifiers=endless, start=5, size=2).all()
    ]
    assert 1000 == len(load(verifiers=endless))
    with pytest.raises(DatasetError, match="not found"):
        load(verifiers="no-such-taskset")


# -------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("mode", ["inline", "subprocess"])
def test_a_run_trains_on_a_taskset(tmp_path: Path, mode: str) -> None:
    """There is no dataset; the rubric's functions stand in the metrics of the step and of the evaluation."""
    small = ("total_steps=2", "batch_size=2", "rollout.group_size=4", "rollout.openai.subproc_max_workers=2")
    result = train(tmp_path / "run", *small, f"rollout.openai.mode={mode}")
    assert 0 == result.exit_code, result.output
    *_, step = read(RunDirectory(path=tmp_path / "run").metrics)

    assert {"rollout/reward.digits", "rollout/metric.characters", "eval-rollout/reward.digits"} <= step.keys()
    assert 8 == step["rollout/reward.digits/count"]


def test_a_rubric_that_raises_is_in_the_failures_of_the_run(tmp_path: Path) -> None:
    """Every episode fails, and so the run ends; each failure has the line of the rubric."""
    taskset = f"{{id: '{TASKS}:WordsTaskset', options: {{rubric: raises}}}}"
    result = train(tmp_path / "run", f"rollout.workflow.verifiers.taskset={taskset}", "eval_dataset=null")
    failures = read(RunDirectory(path=tmp_path / "run").failures)

    assert 1 == result.exit_code
    assert "the grader divides by nothing" in result.stderr
    assert all("raise ZeroDivisionError" in one["traceback"] for one in failures)


def test_a_run_trains_on_reasoning_gym_by_way_of_verifiers(tmp_path: Path) -> None:
    """Its generators are a taskset of the examples."""
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: nox -s verifiers")
    taskset = f"{{id: '{EXAMPLES}/verifiers_tasks.py:PuzzlesTaskset', options: {{size: 4}}}}"
    small = ("total_steps=2", "batch_size=1", "rollout.group_size=2", "eval_dataset=null")
    result = train(tmp_path / "run", *small, f"rollout.workflow.verifiers.taskset={taskset}")
    assert 0 == result.exit_code, result.output

    *_, step = read(RunDirectory(path=tmp_path / "run").metrics)
    assert 2 == step["rollout/reward.solved/count"]


@pytest.mark.parametrize("roles", ["null", "[first]"])
def test_a_run_trains_both_sides_of_a_game_or_one(tmp_path: Path, roles: str) -> None:
    """Self-play: each side is a role, and the outcomes of a game are opposite."""
    pytest.importorskip("textarena", reason="needs textarena: nox -s verifiers")
    taskset = f"rollout.workflow.verifiers.taskset={EXAMPLES}/verifiers_games.py:GameTaskset"
    seat = "{sampling: {max_tokens: 6}}"
    small = ("total_steps=2", "batch_size=1", "rollout.group_size=2", "eval_dataset=null", "engine.max_length=1024")
    env = f"{{id: '{EXAMPLES}/verifiers_games.py:SelfPlay', options: {{first: {seat}, second: {seat}}}}}"
    result = train(
        tmp_path / "run", *small, taskset, f"rollout.workflow.verifiers.env={env}", f"rollout.train_roles={roles}"
    )
    assert 0 == result.exit_code, result.output
    *_, step = read(RunDirectory(path=tmp_path / "run").metrics)
    turns = [turn for one in read(RunDirectory(path=tmp_path / "run").sessions) for turn in one["turns"]]

    assert {0.0} == {step["rollout/first.reward.outcome"] + step["rollout/second.reward.outcome"]}
    trained = {turn["tag"] for turn in turns if any(value for value, _ in turn["mask"])}
    assert {"first"} <= trained <= ({"first", "second"} if roles == "null" else {"first"})
