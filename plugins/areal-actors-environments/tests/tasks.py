"""Tasksets, harnesses and an environment of verifiers that behave as a test wants. Imported where verifiers is."""

from __future__ import annotations

import asyncio

import verifiers.v1 as vf
from pydantic import Field

WORDS = ("red", "green", "blue")


class WordsConfig(vf.TasksetConfig):
    split: str = "train"
    rubric: str = "fair"
    """fair, or how it fails: raises, is_nan, hangs."""


class WordData(vf.TaskData):
    answer: str
    rubric: str


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=2.0)
    async def is_right(self, trace: vf.Trace) -> float:
        if self.data.rubric == "raises":
            raise ZeroDivisionError("the grader divides by nothing")
        if self.data.rubric == "hangs":
            await asyncio.sleep(600)
        return float("nan") if self.data.rubric == "is_nan" else float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.5)
    async def is_short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class WordsTaskset(vf.Taskset[WordTask, WordsConfig]):
    def load(self):
        for word in WORDS if self.config.split == "train" else WORDS[:1]:
            data = WordData(prompt=f"Say {word}.", answer=word, rubric=self.config.rubric)
            yield WordTask(data, self.config.task)


class EndlessTaskset(vf.Taskset[WordTask, WordsConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield WordTask(WordData(prompt=f"Say {number}.", answer=str(number), rubric="fair"), self.config.task)
            number += 1


class FileTask(vf.Task[vf.TaskData]):
    """The harness finds a file of the task, and the rubric reads one of the harness."""

    async def setup(self, runtime: vf.Runtime) -> None:
        await runtime.write("given/words.txt", b"red\n" * 1000)

    @vf.reward
    async def is_counted(self, runtime: vf.Runtime) -> float:
        return float((await runtime.read("count.txt")).strip() == b"1000")


class FileTaskset(vf.Taskset[FileTask, vf.TasksetConfig]):
    def load(self):
        yield FileTask(vf.TaskData(prompt="Count the lines of given/words.txt."), self.config.task)


class ToolboxTask(vf.Task[vf.TaskData]):
    """Uses what a runtime offers to tasks, and rewards 1 for each part that works."""

    async def setup(self, runtime: vf.Runtime) -> None:
        await runtime.write("deep/large", bytes(range(256)) * 20_000)
        await runtime.run_background(["sh", "-c", "while true; do echo tick; sleep 0.05; done"], {}, "ticks.log")

    @vf.reward
    async def reads_large_files(self, runtime: vf.Runtime) -> float:
        whole = await runtime.read("deep/large")
        return float(whole == bytes(range(256)) * 20_000)

    @vf.reward
    async def reads_up_to_a_limit(self, runtime: vf.Runtime) -> float:
        try:
            await runtime.read("deep/large", max_bytes=1000)
        except vf.SandboxError as error:
            return float("over the 1000 byte limit" in str(error))
        return 0.0

    @vf.reward
    async def names_missing_files(self, runtime: vf.Runtime) -> float:
        try:
            await runtime.read("missing")
        except vf.SandboxError as error:
            return float("missing" in str(error))
        return 0.0

    @vf.reward
    async def runs_in_the_background(self, runtime: vf.Runtime) -> float:
        return float(b"tick" in await runtime.read("ticks.log"))

    @vf.reward
    async def talks_to_processes(self, runtime: vf.Runtime) -> float:
        program = "import sys; [print(line.strip().upper(), flush=True) for line in sys.stdin]"
        process = await runtime.open_process(["python3", "-c", program], {})
        heard = []
        for word in (b"one\n", b"two\n"):
            await process.write(word)
            heard.append(await anext(process.stdout))
        before = await process.poll()
        await process.terminate()
        ended = await process.wait()
        try:
            await process.write(b"three\n")
        except BrokenPipeError:
            return float((heard, before, ended, await process.poll()) == ([b"ONE\n", b"TWO\n"], None, 143, 143))
        return 0.0

    @vf.reward
    async def kills_processes(self, runtime: vf.Runtime) -> float:
        process = await runtime.open_process(["sh", "-c", "echo ready; sleep 986"], {})
        await anext(process.stdout)
        await process.kill()
        await runtime.open_process(["sh", "-c", "sleep 985"], {})  # left open: it ends with the box
        return float(await process.wait() == 137)

    @vf.reward
    async def tells_statuses(self, runtime: vf.Runtime) -> float:
        ended = await runtime.run(["sh", "-c", "echo out; echo err >&2; exit 3"], {"A": "b"})
        killed = await runtime.run(["sh", "-c", "kill -9 $$"], {})
        return float((ended.exit_code, ended.stdout, ended.stderr, killed.exit_code) == (3, "out\n", "err\n", 137))


class ToolboxTaskset(vf.Taskset[ToolboxTask, vf.TasksetConfig]):
    def load(self):
        yield ToolboxTask(vf.TaskData(prompt="Say red."), self.config.task)


class SilentHarness(vf.Harness[vf.HarnessConfig]):
    """Ends without a call of the model."""

    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # noqa: PLR0917
        return await runtime.run_program(["sh", "-c", "echo no model is called >&2"], {})


class ScriptHarnessConfig(vf.HarnessConfig):
    script: str = "true"
    program_env: dict[str, str] = Field(default_factory=dict)


class ScriptHarness(vf.Harness[ScriptHarnessConfig]):
    """A program of another company: it needs a container, where a shell script asks the model once with Python."""

    ASK = (
        "import json, os, urllib.request as u; r = u.Request(os.environ['URL'] + '/chat/completions', "
        "json.dumps({'model': 'm', 'messages': [{'role': 'user', 'content': 'Say red.'}]}).encode(), "
        "{'content-type': 'application/json', 'authorization': 'Bearer ' + os.environ['KEY']}); u.urlopen(r).read()"
    )

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # noqa: PLR0917
        await runtime.write("ask.py", self.ASK.encode())
        env = {"URL": endpoint, "KEY": secret, **self.config.program_env}
        return await runtime.run_program(["sh", "-c", self.config.script], env)


class FreeScriptHarness(ScriptHarness):
    """The same without a container."""

    NEEDS_CONTAINER = False


class PairConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class Pair(vf.Env[PairConfig]):
    """Two agents answer the same task; only the first is right to say less."""

    async def run(self, task, agents):
        await agents.first.run(task)
        await agents.second.run(task)

    async def finalize(self, task, episode):
        for trace, value in zip(episode.traces, (1.0, -1.0), strict=True):
            trace.record_reward("outcome", value)


class LoneTask(vf.Task[vf.TaskData]):
    """Its environment rewards it."""


class LoneTaskset(vf.Taskset[LoneTask, vf.TasksetConfig]):
    def load(self):
        yield LoneTask(vf.TaskData(prompt="Say red."), self.config.task)
