"""The session manager's sessions: who may ask, when they end, what is rewarded."""

from __future__ import annotations

import anyio
import pytest
from tests.stacks.callers import Asking, open_waiting
from tests.stacks.inference_stack import encode, open_inference_stack, say

from areal_actors.cache import SessionSettings
from areal_actors.domain import Credential, SessionId
from areal_actors.errors import Forbidden, NotFound, SessionEnded, Unauthorized
from areal_actors.messages import ClaimPermit, DescribeCapacity, EndSession, ForgetSession
from areal_actors.sessions.manager import SessionsConfig
from areal_actors.testing.engines import EchoEngine

pytestmark = pytest.mark.anyio


# --------------------------------------------------------------------------------------------------- who may ask


async def test_keys_open_their_own_session_only():
    """A URL, foreign and completion keys and unknown sessions are refused by name."""
    async with open_inference_stack() as inference:
        mine, other = await inference.open(), await inference.open()
        for credential in (
            Credential(key=mine.api_key),
            Credential(session=mine.session, key=mine.api_key),
            Credential(session=mine.session, has_control=True),
        ):
            reply = await inference.sessions.ask(EndSession(credential=credential))
            assert mine.session == reply.session

        for credential, error in (
            (Credential(key="sk-of-unknown"), Unauthorized),
            (Credential(session=mine.session), Unauthorized),
            (Credential(session=mine.session, key="sk-any-other"), Unauthorized),
            (Credential(session=mine.session, key=other.api_key), Unauthorized),
            (Credential(session=mine.session, key=other.completion_key), Unauthorized),
            (Credential(session=mine.session, key=mine.completion_key), Forbidden),
            (Credential(key=mine.completion_key), Forbidden),
            (Credential(session=mine.session, is_capability=False), Unauthorized),
            (Credential(session=SessionId("unknown")), NotFound),
        ):
            with pytest.raises(error):
                await inference.sessions.ask(EndSession(credential=credential))


async def test_forgetting_ends_a_live_session():
    """A request in flight is refused."""
    async with open_waiting() as (inference, session, asking):
        for name in (session, session, SessionId("unknown")):
            await inference.sessions.ask(ForgetSession(session=name))
        inference.engine.release(99)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(NotFound):
            await inference.record(session)

    assert isinstance(asking.error, SessionEnded)


# ---------------------------------------------------------------------------------------------- rewards and time


async def test_idle_session_ends_and_returns_its_permit():
    """It can still be exported."""
    config = SessionsConfig(lifetimes=SessionSettings(idle_seconds=100), sweep_seconds=10)
    async with open_inference_stack(sessions=config) as inference:
        permit = await inference.capacity.ask(ClaimPermit(holder="external"))
        session = (await inference.open(permit=permit.id)).session
        await anyio.sleep(90)
        assert 1 == (await inference.capacity.ask(DescribeCapacity())).running

        await anyio.sleep(30)
        view = await inference.capacity.ask(DescribeCapacity())
        assert (0, 0) == (view.running, view.accepted)
        assert (await inference.record(session)).is_ended


async def test_session_with_a_request_in_flight_is_not_idle():
    config = SessionsConfig(lifetimes=SessionSettings(idle_seconds=100), sweep_seconds=10)
    engine = EchoEngine(lambda _: encode("at last"), is_gated=True)
    async with open_inference_stack(sessions=config, engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        asking = Asking()
        tasks.start_soon(lambda: asking.complete(inference, session))
        await anyio.sleep(1000)
        engine.release(99)
        await anyio.sleep(50)

        assert asking.answers
        assert not (await inference.record(session)).is_ended


@pytest.mark.parametrize("ending", ["end", "forget"])
async def test_external_session_returns_its_permit_unaccepted(ending: str):
    """Its rows do not go to the trainer."""
    async with open_inference_stack() as inference:
        permit = await inference.capacity.ask(ClaimPermit(holder="external"))
        session = (await inference.open(permit=permit.id)).session
        await inference.complete(session, say("what?"))
        for _ in range(2):
            if ending == "end":
                await inference.sessions.ask(EndSession(credential=Credential(session=session, has_control=True)))
            else:
                await inference.sessions.ask(ForgetSession(session=session))
        await anyio.wait_all_tasks_blocked()
        view = await inference.capacity.ask(DescribeCapacity())

        assert (0, 0) == (view.running, view.accepted)
