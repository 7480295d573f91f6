"""A function over a dataset: order, rewards, retries, and what becomes of the rest when one thing fails."""

from __future__ import annotations

import io
from asyncio import CancelledError
from random import Random

import anyio
import httpx
import numpy as np
import pytest

from areal_actors.client import AgentRunner, RetryPolicy
from areal_actors.client.agent_runner import (
    parse_outcome,
)
from areal_actors.errors import ConfigError, DatasetError, EpisodeError, Unauthorized
from areal_actors_testing.serving import open_scripted_proxy

pytestmark = pytest.mark.anyio

QUICK = RetryPolicy(max_attempts=3, first_wait_seconds=1e-6, max_wait_seconds=1e-6)


def runner(proxy, **options):
    options = {"retries": QUICK, "is_quiet": True, "random": Random(0)} | options
    return AgentRunner(base_url=proxy.url, api_key=proxy.endpoint.admin_key, **options)


def rewards(proxy, result):
    return [interaction.reward for interaction in proxy.sessions._interactions[result.session].values()]


class Asker:
    """Asks once or twice, and returns what a table says."""

    def __init__(self, proxy, returns, *, num_turns=2):
        self.url, self.returns, self.num_turns = f"{proxy.url}/v1/chat/completions", returns, num_turns

    async def run(self, item):
        question = {"model": "m", "messages": [{"role": "user", "content": str(item)}]}
        async with httpx.AsyncClient() as http:
            ids = [(await http.post(self.url, json=question)).json()["id"] for _ in range(self.num_turns)]
        return self.returns(item, ids)


@pytest.mark.parametrize(
    ("returns", "expected", "reward"),
    [
        (lambda item, ids: 0.5, [None, 0.5], 0.5),
        (lambda item, ids: np.float32(0.5), [None, 0.5], 0.5),
        (lambda item, ids: True, [None, 1.0], 1.0),
        (lambda item, ids: {ids[0]: 1, ids[1]: -0.5}, [1.0, -0.5], 0.5),
        (lambda item, ids: {}, [None, None], 0),
        (lambda item, ids: None, [None, None], None),
    ],
)
async def test_agent_runner_rewards_what_the_agent_returns(returns, expected, reward):
    """A number finalizes, a dict rewards by completion, ``None`` leaves it to the agent; the session ends."""
    async with open_scripted_proxy() as proxy:
        (result,) = (await runner(proxy).run(Asker(proxy, returns).run, ["one"])).results

        assert expected == rewards(proxy, result)
        assert (reward, 1, None) == (result.reward, result.num_attempts, result.error)
        assert 0 == proxy.sessions._store.num_live


@pytest.mark.parametrize("value", ["0.5", float("nan"), float("inf"), [1.0], object(), {"id": "x"}, {3: 1.0}])
async def test_agent_runner_refuses_other_return_values(value):
    """Once: the next attempt would return the same."""
    async with open_scripted_proxy() as proxy:
        (result,) = (await runner(proxy).run(Asker(proxy, lambda item, ids: value).run, ["one"])).results

        assert isinstance(result.error, EpisodeError)
        assert "Asker.run returned a value that is not a reward" in str(result.error)
        assert [None, None] == rewards(proxy, result)
        assert 1 == result.num_attempts


async def test_agent_runner_returns_results_in_order():
    """However the items finish; from lists, generators, and asynchronous ones, and no more in work than allowed."""
    running, most = 0, 0

    async def agent(item):
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        for _ in range(10 - item):
            await anyio.lowlevel.checkpoint()
        running -= 1
        return float(item)

    async def later():
        for item in range(10):
            await anyio.lowlevel.checkpoint()
            yield item

    async with open_scripted_proxy() as proxy:
        asker = Asker(proxy, lambda item, ids: None, num_turns=1)

        async def asking(item):
            await asker.run(item)
            return await agent(item)

        for dataset in (range(10), (item for item in range(10)), later()):
            batch = await runner(proxy, max_concurrent=4).run(asking, dataset)
            assert [*map(float, range(10))] == list(batch.rewards)
            assert [*range(10)] == [result.index for result in batch.results]

    assert 2 <= most <= 4


async def test_agent_runner_repeats_a_failed_item_in_a_new_session():
    """Its session ended without a final reward; after the last attempt the failure is the result, and others go on."""
    tries = {}

    def returns(item, ids):
        tries.setdefault(item, []).append(ids)
        if item == "never" or (item == "second" and len(tries[item]) == 1):
            raise KeyError(item)
        return 1.0

    async with open_scripted_proxy() as proxy:
        batch = await runner(proxy).run(Asker(proxy, returns).run, ["first", "second", "never", "last"])

        assert [1, 2, 3, 1] == [result.num_attempts for result in batch.results]
        assert [False, False, True, False] == [result.is_failed for result in batch.results]
        assert isinstance(batch.failed[0].error, KeyError)
        assert [None, None] == rewards(proxy, batch.failed[0])
        assert 7 == len(proxy.sessions._interactions)
        assert 3 == sum(any(i.reward for i in told.values()) for told in proxy.sessions._interactions.values())
        assert 3 == batch.num_retries
        assert 0 == proxy.sessions._store.num_live


async def test_agent_runner_raises_errors_of_dataset_and_key():
    """What is in work comes to its end, nothing more begins, and the error says which it was."""
    done = []

    async def agent(item):
        done.append(item)

    def dataset():
        yield from range(3)
        raise OSError("disk")

    async with open_scripted_proxy() as proxy:
        with pytest.raises(DatasetError, match="after 3 items: OSError: disk"):
            await runner(proxy).run(agent, dataset())
        with pytest.raises(Unauthorized):
            await AgentRunner(base_url=proxy.url, api_key="sk-wrong-key", is_quiet=True).run(agent, range(1000))
    with pytest.raises(ConfigError, match="OPENAI_BASE_URL"):
        await AgentRunner(environment={}, is_quiet=True).run(agent, [1])
    with pytest.raises(ConfigError, match="max_concurrent"):
        AgentRunner(max_concurrent=0)

    assert [0, 1, 2] == sorted(done)


async def test_agent_runner_ends_all_sessions_when_cancelled():
    """None of them is left for the server to find."""
    started = anyio.Event()
    num_started = 0

    async def agent(item):
        nonlocal num_started
        num_started += 1
        if num_started == 5:
            started.set()
        await anyio.sleep_forever()

    async with open_scripted_proxy() as proxy, anyio.create_task_group() as tasks:
        tasks.start_soon(runner(proxy, max_concurrent=5).run, agent, range(100))
        await started.wait()
        assert 5 == proxy.sessions._store.num_live
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            while proxy.sessions._store.num_live:
                await anyio.lowlevel.checkpoint()

    assert 5 == num_started


async def test_agent_runner_refuses_a_plain_function():
    """Its error says what to give instead."""

    def plain(item):
        return 1.0

    async with open_scripted_proxy() as proxy:
        (result,) = (await runner(proxy).run(plain, ["one"])).results

        assert "async def" in str(result.error)


async def test_agent_runner_reports_an_agent_that_cancels_itself(anyio_backend):
    """It is a failure like any other, and no item is lost by it."""
    if anyio_backend == "trio":
        pytest.skip("trio has no cancellation that a program could raise")

    async def agent(item):
        if item:
            raise CancelledError

    async with open_scripted_proxy() as proxy:
        batch = await runner(proxy).run(agent, [0, 1, 0])

        assert [False, True, False] == [result.is_failed for result in batch.results]
        assert 0 == proxy.sessions._store.num_live


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
async def test_agent_runner_prints_progress_and_summary(stream):
    """At a terminal and elsewhere: what failed, and how it went in the end."""
    shown = stream()

    async def agent(item):
        if item == 1:
            raise KeyError("[bold]no")
        return 0.5

    async with open_scripted_proxy() as proxy:
        asker = Asker(proxy, lambda item, ids: None)

        async def asking(item):
            await asker.run(item)
            return await agent(item)

        await runner(proxy, is_quiet=False, stream=shown).run(asking, range(3))
    text = " ".join(shown.getvalue().split())

    assert "item 1 failed after 3 attempts: KeyError: '[bold]no'" in text
    assert "2 of 3 items" in text
    assert "mean reward 0.500, 2 retries, 1 failed" in text


def test_outcome_that_is_no_reward_names_its_function():
    """Completion ids are text, and errors name the function and the value."""
    assert {"a": 1.0} == parse_outcome({"a": True}, name="agent")
    with pytest.raises(EpisodeError, match=r"agent returned a value that is not a reward.*not by int 3"):
        parse_outcome({3: 1.0}, name="agent")
