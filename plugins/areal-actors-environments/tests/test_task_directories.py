"""Task directories: an agent in one box, the verifier in another, and no way from the first to the reward."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_actors.datasets import DatasetConfig, Problems, load_problems
from areal_actors.errors import DatasetError, EpisodeError, SandboxError
from areal_actors.lib.references import import_reference
from areal_actors.sandbox import SandboxConfig, create_sandbox
from areal_actors.workflows import (
    CommandAgent,
    CommandConfig,
    EpisodeContext,
    PoolConfig,
    find_environment,
    workflow_context,
)
from areal_actors_environments.harbor import HarborTasks, load_task
from areal_actors_environments.task_directories import grade_files, grade_solution

pytestmark = pytest.mark.anyio

EXAMPLES = Path(__file__).parents[3] / "examples" / "tasks"
NOWHERE = {"base_url": "http://127.0.0.1:1/s/v1", "api_key": "key"}
pytest.importorskip("areal_actors_sandbox", reason="needs a plug-in: pip install -e plugins/areal-actors-sandbox")
BOXED = SandboxConfig(backend="bubblewrap", memory_mib=512, disk_mib=16)


def check_all(problems: Problems, config: SandboxConfig) -> None:
    """Check the task of every problem, as a run does when it loads them."""
    for problem in problems.all():
        environment = find_environment(problem.data)
        assert environment is not None
        environment.check(problem.data, config)


@pytest.fixture(scope="module", autouse=True)
def require_bubblewrap():
    """Real boxes, or none of these tests."""
    try:
        create_sandbox(BOXED.backend).check(BOXED)
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture
def write_task(tmp_path: Path):
    """Writes a task directory whose verifier is a shell script."""

    def write(test: str, *, settings: str = "", files: Mapping[str, str] | None = None) -> Path:
        path = tmp_path / "tasks" / "task"
        for name, text in {
            "instruction.md": "Do it.",
            "task.toml": settings,
            "tests/test.sh": test,
            **(files or {}),
        }.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
        return path

    return write


@asynccontextmanager
async def open_agent(script: str, config: SandboxConfig = BOXED, **command: Any) -> AsyncIterator[CommandAgent]:
    """A shell script as an agent; what hangs fails."""
    with anyio.fail_after(60):
        given = CommandConfig(command=("sh", "-c", script), **command)
        async with CommandAgent.open(given, PoolConfig(num_workers=1), sandbox=config) as agent:
            yield agent


async def run(script: str, task: Path, config: SandboxConfig = BOXED) -> tuple[Any, Mapping[str, float]]:
    """One episode's reward and numbers."""
    async with open_agent(script, config) as agent:
        with workflow_context.enter(EpisodeContext()):
            return await agent.run(load_task(task).problem, **NOWHERE), workflow_context.logged()


@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.iterdir()))
async def test_the_examples_reward_their_solution_and_nothing_else(name):
    """The oracle gets 1, and an agent that does nothing 0."""
    task = load_task(EXAMPLES / name)

    assert 1.0 == (await grade_solution(task, BOXED)).reward
    assert 0.0 == (await grade_solution(task, BOXED, is_solved=False)).reward


async def test_an_agent_works_in_the_environment_and_is_rewarded_by_the_verifier():
    """In /app with the files of the environment; the other numbers of reward.json are logged."""
    task = EXAMPLES / "words"
    assert (1.0, {"has_answered": 1.0}) == await run(
        "test $PWD = /app && grep -q Actor data/text.txt && echo 3 > count.txt", task
    )
    assert (0.0, {"has_answered": 1.0}) == await run("echo 4 > /app/count.txt", task)
    assert (0.0, {"has_answered": 0.0}) == await run("true", task)


async def test_an_agent_finds_its_instruction_its_key_and_its_logs(write_task):
    """And not the metadata, which may have the solution."""
    task = write_task("cp /logs/artifacts/reward.txt /logs/verifier/", settings="[metadata]\nanswer = 'secret'")
    script = (
        'test "$(cat $AREAL_INSTRUCTION)" = "Do it." && grep -q "Do it" $AREAL_PROBLEM && grep -q name && '
        'test "$OPENAI_API_KEY" = key && ! grep -q secret $AREAL_PROBLEM && touch /logs/agent/log && '
        "echo 0.5 > /logs/artifacts/reward.txt"
    )
    reward, _ = await run(script, task)
    assert 0.5 == reward


REWARDS = {
    "a number": ("echo 0.25 > /logs/verifier/reward.txt", 0.25, {}),
    "an object": (
        'echo \'{"reward": 1, "speed": 2.5, "notes": "fast"}\' > /logs/verifier/reward.json',
        1.0,
        {"speed": 2.5},
    ),
    "the only number": ("echo '{\"accuracy\": 0.75}' > /logs/verifier/reward.json", 0.75, {}),
    "both": ("echo 0 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json", 1.0, {}),
    "a status": ("echo 1 > /logs/verifier/reward.txt; exit 3", 1.0, {}),
    "no end": ("echo 1 > /logs/verifier/reward.txt; sleep 100", 0.0, {"grader_limit": 1.0}),
}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(("test", "reward", "numbers"), REWARDS.values(), ids=REWARDS.keys())
async def test_the_reward_is_what_the_verifier_wrote(write_task, tmp_path, test, reward, numbers):
    """reward.json before reward.txt, whatever the exit status; a verifier that exceeds its limit gives 0."""
    task = load_task(write_task(test, settings="[verifier]\ntimeout_sec = 0.5"))
    verdict = await grade_files(task, tmp_path / "no files", BOXED)

    assert (reward, numbers) == (verdict.reward, verdict.numbers)


MALFORMED = {
    "nothing": ("echo why >&2", r"wrote no reward to /logs/verifier/reward\.txt(.|\n)*status 0(.|\n)*why"),
    "text": ("echo well done > /logs/verifier/reward.txt", "wrote 'well done.n' to reward.txt: could not convert"),
    "an empty file": ("touch /logs/verifier/reward.txt", "wrote '' to reward.txt"),
    "no finite number": ("echo nan > /logs/verifier/reward.txt", "a reward is finite"),
    "no object": ("echo '[1]' > /logs/verifier/reward.json", "an object of numbers"),
    "unnamed numbers": (
        'echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json',
        "numbers a, b; name one of them reward",
    ),
    "a link": ("ln -s /app/reward.txt /logs/verifier/reward.txt; echo 1 > /app/reward.txt", "wrote no reward"),
}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(("test", "reason"), MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_missing_or_malformed_reward_fails_the_episode(write_task, tmp_path, test, reason):
    """With the reason and the end of the verifier's output."""
    with pytest.raises(EpisodeError, match=reason):
        await grade_files(load_task(write_task(test)), tmp_path / "no files", BOXED)


FORGE = "echo 1 > /logs/verifier/reward.txt"
ATTACKS = {
    "the reward file": f"mkdir -p /logs/verifier; {FORGE}; echo '{{{{}}}}' > /logs/verifier/reward.json",
    "the tests": f"mkdir -p /tests && echo '{FORGE}' > /tests/test.sh; mount --bind /app /tests",
    "a copy of the tests": "cat /tests/* /solution/* {task}/tests/* {task}/solution/* > answer.txt",
    "a link to the tests": "ln -s /tests/expected answer.txt",
    "a link to the tests of the host": "ln -s {task}/tests/expected answer.txt",
    "a link to the logs": "rm -rf /app/*; ln -s /logs/verifier answer.txt",
    "a daemon": f"setsid sh -c 'while true; do {FORGE}; cp /tests/expected /app/answer.txt; done' >/dev/null 2>&1 &",
    "programs of the grader": (
        "mkdir -p bin ~/bin; for p in cmp echo sh; do echo 'echo 1' > bin/$p; chmod +x bin/$p; cp bin/$p .; done; "
        "export PATH=/app:$PATH"
    ),
    "start files of the shell": (
        f"for f in .profile .bashrc .bash_profile .shrc; do echo '{FORGE}; exit' | tee $f > ~/$f; done; "
        "export ENV=/app/.shrc BASH_ENV=/app/.bashrc"
    ),
    "the problem": "rm -f $AREAL_PROBLEM; ln -s /logs/verifier/reward.txt $AREAL_PROBLEM",
    "artifacts": "echo 1 > /logs/artifacts/reward.txt; ln -s ../verifier /logs/artifacts/v",
    "the way out": "mkdir -p x; ln -s ../../logs/verifier x/v; ln -s / root; echo 1 > root/logs/verifier/reward.txt",
}


@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
async def test_grading_rewards_no_attack(write_task, attack):
    """An agent that does not have the answer gets 0, and the task's files are what they were."""
    test = "cmp -s answer.txt /tests/expected && reward=1; echo ${reward:-0} > /logs/verifier/reward.txt"
    task = write_task(
        test, files={"tests/expected": "the answer\n", "solution/solve.sh": "echo the answer > answer.txt"}
    )
    before = {path: path.read_bytes() for path in task.rglob("*") if path.is_file()}
    reward, _ = await run(f"({attack.format(task=task)}) 2>/dev/null; true", task)

    assert 0.0 == reward
    assert before == {path: path.read_bytes() for path in task.rglob("*") if path.is_file()}


async def test_an_agent_that_exceeds_the_limit_of_its_task_is_graded(write_task):
    """For what it left, as Harbor does; it is logged."""
    task = write_task("cp /app/reward.txt /logs/verifier/", settings="[agent]\ntimeout_sec = 0.4")
    assert (0.5, {"agent_timeout": 1.0}) == await run("echo 0.5 > reward.txt; sleep 100", task)


async def test_variables_and_limits_of_a_task_reach_its_boxes(write_task, monkeypatch):
    """The verifier's are not the agent's; ``${NAME}`` is a variable of the run."""
    monkeypatch.setenv("JUDGE_KEY", "from the host")
    settings = """
        [environment]
        storage_mb = 1
        env = {SHARED = "a", WITH_DEFAULT = "${NOT_SET_ANYWHERE:-b}"}
        [verifier]
        env = {KEY = "${JUDGE_KEY}"}
        """
    test = 'test "$SHARED$WITH_DEFAULT$KEY" = "abfrom the host" && cp reward.txt /logs/verifier/'
    task = write_task(test, settings=settings)
    script = (
        'test "$SHARED$WITH_DEFAULT$KEY" = ab && ! head -c 3000000 /dev/zero > big && rm big && echo 1 > reward.txt'
    )
    assert (1.0, {}) == await run(script, task)


async def test_a_relocatable_task_runs_without_a_sandbox(write_task):
    """Its scripts find their files by their own place and by LOGS_DIR."""
    test = 'cmp -s answer.txt "$TEST_DIR/expected" && echo 1 > "$LOGS_DIR/verifier/reward.txt"'
    task = write_task(
        test, settings="[metadata]\nrelocatable = true", files={"tests/expected": "x", "environment/given": "x"}
    )
    reward, _ = await run("cp given answer.txt", task, SandboxConfig())

    assert 1.0 == reward


async def test_a_task_that_cannot_run_is_refused_before_the_first_step(write_task, tmp_path):
    """Without a sandbox it would write to the paths of the host; an unset variable is named."""
    problems = Problems([load_task(EXAMPLES / "words").problem])
    check_all(problems, BOXED)
    with pytest.raises(DatasetError, match="which exist only in a sandbox; set it to bubblewrap"):
        check_all(problems, SandboxConfig())
    task = write_task("true", settings='[verifier]\nenv = {KEY = "${NOT_SET_ANYWHERE}"}')
    with pytest.raises(DatasetError, match="the variable NOT_SET_ANYWHERE, which is not set"):
        check_all(Problems([load_task(task).problem]), BOXED)
    shutil.rmtree(task)
    async with open_agent("true") as agent:
        with pytest.raises(EpisodeError, match=r"No such file or directory: .*task\.toml"):
            await agent.run({"task_directory": str(task)}, **NOWHERE)
    async with open_agent("true", grader=("true",)) as agent:
        with pytest.raises(EpisodeError, match="leave the grader out"):
            await agent.run(problems.at(0).data, **NOWHERE)


def directory_of(path: str) -> DatasetConfig:
    """A dataset of task directories."""
    return DatasetConfig(plugins={"harbor": HarborTasks(path=path)})


def test_a_directory_of_tasks_is_a_dataset():
    """By name; one task directory is a dataset of one problem."""
    found = load_problems(directory_of(str(EXAMPLES)), import_reference=import_reference)
    assert ["digits", "script", "words"] == [problem.data["name"] for problem in found.all()]
    one = load_problems(directory_of("words"), import_reference=import_reference, directory=EXAMPLES)
    assert ["text"] == [problem.data["metadata"]["category"] for problem in one.all()]
