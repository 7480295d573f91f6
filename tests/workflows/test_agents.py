"""What an agent returns, and what becomes of it when it does anything else."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import InteractionId
from areal_actors.errors import EpisodeError, NotFound
from areal_actors.workflows import Agent, Injected, Reward, direct_connections, parse_result, run_agent
from areal_actors.workflows.agents import describe_error

NUMBERS = [
    (0.5, 0.5),
    (3, 3.0),
    (True, 1.0),
    (np.float32(0.25), 0.25),
    (np.int64(-2), -2.0),
    (np.bool_(True), 1.0),
    (np.array([0.5]), 0.5),
    (torch.tensor(1.5), 1.5),
    (torch.tensor([True]), 1.0),
]


class Unreadable(Exception):
    """An exception of an SDK whose text cannot be made."""

    def __str__(self) -> str:
        """Raise."""
        raise RuntimeError("no text")


def test_exception_without_text_is_described():
    """Its ``__str__`` raises: the episode fails by its type, and the run goes on."""
    assert "Unreadable: its text cannot be read, since __str__ raised RuntimeError" == describe_error(Unreadable())


@pytest.mark.parametrize(("returned", "expected"), NUMBERS, ids=repr)
def test_reward_may_be_any_scalar(returned: Any, expected: float):
    """Of Python, of numpy and of torch, alone or by completion."""
    assert Reward(last=expected) == parse_result(returned)
    assert {InteractionId("a"): expected} == parse_result({"a": returned}).by_interaction
    assert type(parse_result(returned).last) is float


NONSENSE = [
    (None, "NoneType"),
    ("0.5", "str"),
    ([1.0], "list"),
    (1j, "complex"),
    (Decimal("0.5"), "Decimal"),
    (np.zeros(2), "not a reward"),
    (torch.zeros(3), "not a reward"),
    (10**400, "not a reward"),
    ({"a": None}, "NoneType"),
    ("x" * 1000, "…"),
]


@pytest.mark.parametrize(("returned", "complaint"), NONSENSE, ids=lambda value: type(value).__name__)
def test_reward_of_another_type_is_refused(returned: Any, complaint: str):
    """The message names the agent, what it returned and its type, in a line that can be read."""
    with pytest.raises(EpisodeError, match=complaint) as refusal:
        parse_result(returned, agent="MyAgent")

    assert "MyAgent.run returned" in str(refusal.value)
    assert 300 > len(str(refusal.value))


@given(rewards=st.dictionaries(st.text(), st.one_of(st.floats(), st.integers(-(10**9), 10**9), st.booleans())))
def test_rewards_by_completion_keep_their_ids_and_values(rewards: dict[str, float]):
    """Finite or not: what is a number is passed on, and judged where it is kept."""
    found = parse_result(rewards)

    assert found.last is None
    assert list(rewards) == list(found.by_interaction)
    for name, value in rewards.items():
        kept = found.by_interaction[InteractionId(name)]
        assert kept == value or (math.isnan(kept) and math.isnan(value))


class Doing(Agent):
    """An agent of one function."""

    def __init__(self, act: Callable[..., Awaitable[Any]]) -> None:
        self.act = act

    async def run(self, data: Any, **extra_kwargs: Any) -> Any:
        return await self.act(data, **extra_kwargs)


async def run(act: Callable[..., Awaitable[Any]]) -> Reward:
    async with httpx.AsyncClient() as client:
        return await run_agent(Doing(act), {"x": 1}, Injected(base_url="u", api_key="k", http_client=client))


@pytest.mark.anyio
async def test_agent_is_given_its_problem_and_a_way_to_the_model():
    """Everything that an OpenAI client takes."""

    async def act(data: Any, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> float:
        assert ({"x": 1}, "u", "k") == (data, base_url, api_key)
        assert not http_client.is_closed
        return 1.0

    assert Reward(last=1.0) == await run(act)


def raising(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def act(data: Any, **_: Any) -> Any:
        raise error

    return act


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (ValueError("no\nanswer"), "ValueError: no"),
        (NotFound("no such thing"), "raised no such thing"),
        (TimeoutError(), "TimeoutError"),
        (SystemExit(2), "SystemExit"),
        (GeneratorExit(), "GeneratorExit"),
        (BaseExceptionGroup("of tasks", [SystemExit(3)]), "SystemExit: 3"),
        (ExceptionGroup("several", [KeyError("inner")]), "KeyError: 'inner'"),
        (EpisodeError("as it is"), "^as it is$"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_agent_exception_fails_only_its_episode(error: BaseException, complaint: str):
    """The first cause is named, and kept with its traceback."""
    with pytest.raises(EpisodeError, match=complaint) as failure:
        await run(raising(error))

    assert failure.value is error or failure.value.__cause__ is error


@pytest.mark.anyio
async def test_agent_that_cancels_itself_has_failed(anyio_backend: str):
    """On asyncio a task ends without a word when what it awaits was cancelled; its episode must not."""
    if anyio_backend == "trio":
        pytest.skip("trio has no cancellation that a task could bring upon itself")

    async def await_a_cancelled_future(data: Any, **_: Any) -> float:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        return await future

    async def cancel_own_task(data: Any, **_: Any) -> float:
        asyncio.current_task().cancel()
        await asyncio.sleep(1)
        return 1.0

    for act in (await_a_cancelled_future, cancel_own_task):
        with pytest.raises(EpisodeError, match="was cancelled"):
            await run(act)


@pytest.mark.anyio
async def test_cancelling_the_caller_cancels_the_agent():
    """A run that stops takes its agents with it, and they may clean up."""
    cleaned = []

    async def act(data: Any, **_: Any) -> float:
        try:
            await anyio.sleep_forever()
        finally:
            cleaned.append(sys.exc_info()[0])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, act)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    assert 1 == len(cleaned)


def test_injected_key_is_hidden_in_repr():
    """Injected arguments are printed in logs and tracebacks."""
    assert "secret" not in repr(Injected(base_url="u", api_key="secret", http_client=None))


@pytest.fixture
def unproxied(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without proxies."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    return monkeypatch


OURS = "localhost,127.0.0.1,::1"


@pytest.mark.parametrize(
    ("before", "hosts", "within"),
    [
        ({}, ("10.0.0.1",), {}),
        ({"NO_PROXY": "a.org"}, (), {"NO_PROXY": "a.org"}),
        ({"HTTP_PROXY": "http://p:1"}, (), {"NO_PROXY": OURS, "no_proxy": OURS}),
        ({"all_proxy": "http://p:1"}, ("http://node-7:80/v1",), {"no_proxy": f"{OURS},node-7"}),
        (
            {"https_proxy": "http://p:1", "no_proxy": "a.org,::1"},
            ("10.0.0.1",),
            {"NO_PROXY": f"a.org,::1,{OURS[:-4]},10.0.0.1"},
        ),
        ({"HTTP_PROXY": ""}, (), {}),
    ],
)
def test_direct_connections_bypass_a_proxy(
    unproxied: pytest.MonkeyPatch, before: dict[str, str], hosts: tuple[str, ...], within: dict[str, str]
):
    """Only where one is set; afterwards the environment is as it was, when the last of several blocks has ended."""
    for name, value in before.items():
        unproxied.setenv(name, value)
    one, two = direct_connections(*hosts), direct_connections()
    one.__enter__()
    two.__enter__()
    assert within.items() <= os.environ.items()
    one.__exit__(None, None, None)
    assert bool(within) == ("::1" in os.environ.get("no_proxy", "") or before == {"NO_PROXY": "a.org"})
    two.__exit__(None, None, None)

    assert before == {name: os.environ[name] for name in os.environ if name.lower().endswith("_proxy")}
