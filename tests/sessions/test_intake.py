"""External sessions become training data: when they are taken, as what, and who else may have them."""

from __future__ import annotations

import anyio
import pytest
from tests.stacks.inference_stack import say
from tests.stacks.service import GRACE, IDLE, Service, open_service

from areal_actors.domain import Credential
from areal_actors.errors import CapacityExhausted, Conflict, NotFound
from areal_actors.messages import (
    EndSession,
    EpisodeFinished,
    SessionArchived,
    SessionsCounted,
    SetReward,
    SettleTaken,
    TakenSession,
    TakeSession,
)

pytestmark = pytest.mark.anyio


# ------------------------------------------------------------------------------------------------ when, and what


async def test_finalized_session_is_delivered_at_once():
    """Its memory is freed once it was trained."""
    async with open_service() as service:
        await service.play(await service.start(), final=0.5)
        (group,) = await service.lease()
        (episode,) = group.episodes
        await anyio.wait_all_tasks_blocked()

        assert (0.5, 1, None) == (episode.reward, len(episode.trajectories), episode.failure)
        counts = [news.num_live for news in service.notebook.news if isinstance(news, SessionsCounted)]
        others = [type(news) for news in service.notebook.news if not isinstance(news, SessionsCounted)]
        assert [1, 0] == counts
        assert [EpisodeFinished, SessionArchived] == others
        assert (0, 1) == await service.counts()
        assert 0 == await service.num_sessions()


async def test_late_reward_counts():
    """The session is kept for the grace period."""
    async with open_service() as service:
        session = await service.start()
        await service.play(session)
        assert () == await service.lease(seconds=GRACE / 2)
        await service.inference.sessions.ask(
            SetReward(credential=Credential(session=session, has_control=True), reward=0.75)
        )
        (group,) = await service.lease(seconds=GRACE)

        assert 0.75 == group.episodes[0].reward


async def test_finalizing_after_the_end_skips_the_grace_period():
    async with open_service() as service:
        session = await service.start()
        await service.play(session)
        assert () == await service.lease()
        await service.inference.sessions.ask(
            EndSession(credential=Credential(session=session, has_control=True), final_reward=1.0)
        )
        (group,) = await service.lease()

        assert 1.0 == group.episodes[0].reward


async def test_session_without_a_reward_is_rejected():
    """Its permit returns."""
    async with open_service() as service:
        await service.play(await service.start())
        assert (1, 0) == await service.counts()
        assert () == await service.lease(seconds=2 * GRACE)

        assert ["no_reward"] == [str(failure).split(":")[0] for failure in service.failures]
        assert (0, 0) == await service.counts()
        assert 0 == await service.num_sessions()


async def test_expired_session_is_rejected_and_returns_its_permit():
    async with open_service(max_concurrent=1) as service:
        session = await service.start()
        await service.inference.complete(session, say("what?"))
        with pytest.raises(CapacityExhausted):
            await service.start()
        await anyio.sleep(2 * IDLE)
        await service.play(await service.start(), final=1.0)

        assert (0, 1) == await service.counts()
        assert ["expired", "None"] == [str(failure).split(":")[0] for failure in service.failures]


async def test_rewards_beyond_float_reject_their_session_only():
    async with open_service() as service:
        session = await service.start()
        for question in ("what?", "why?"):
            answer = await service.inference.complete(session, say(question))
            await service.inference.sessions.ask(
                SetReward(
                    credential=Credential(session=session, has_control=True),
                    reward=3e38,
                    interaction=answer[0].interaction,
                )
            )
        await service.inference.sessions.ask(EndSession(credential=Credential(session=session, has_control=True)))
        await service.play(await service.start(), final=0.5)
        (group,) = await service.lease()

        assert 0.5 == group.episodes[0].reward
        assert ["Its rows cannot be built", "None"] == [str(failure).split(":")[0] for failure in service.failures]


async def test_session_that_another_client_forgot_is_rejected():
    """Its group continues without it."""
    from areal_actors.messages import ForgetSession

    async with open_service() as service:
        session = await service.start()
        await service.play(session)
        await service.inference.sessions.ask(ForgetSession(session=session))
        await anyio.sleep(2 * GRACE)

        assert ["forgotten"] == [str(failure).split(":")[0] for failure in service.failures]
        assert (0, 0) == await service.counts()


# ------------------------------------------------------------------------------------------------------- by hand


async def take(service: Service, taker: str, *, is_kept: bool = True) -> TakenSession:
    taken = await service.intake.ask(TakeSession(taker=taker))
    await service.intake.tell(SettleTaken(taker=taker, is_kept=is_kept))
    return taken


async def test_finished_sessions_are_lent_once_each():
    """A session that is not kept goes to the next client."""
    async with open_service(is_delivering=False) as service:
        first, second = await service.start(), await service.start()
        for session in (first, second):
            await service.play(session, final=1.0)
        given_back = await take(service, "a", is_kept=False)
        kept = [await take(service, name) for name in ("b", "c")]
        await anyio.wait_all_tasks_blocked()

        assert first == given_back.episode.session
        assert [first, second] == [taken.episode.session for taken in kept]
        assert (0, 0) == await service.counts()
        with pytest.raises(NotFound):
            await service.inference.record(first)


async def test_taking_sessions_of_a_training_service_is_refused():
    async with open_service() as service:
        with pytest.raises(Conflict, match="go to its trainer"):
            await service.intake.ask(TakeSession(taker="a"))
