"""A service with several processes, each with its own sessions: one service to its agents and its trainer."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from tests.stacks.shards import open_first

from areal_actors.cache.session import process_of
from areal_actors.domain import EpisodeLimits
from areal_actors.errors import JournalError
from areal_actors.journal import JournalConfig
from areal_actors.messages import (
    AcknowledgeLease,
    CollectSession,
    DescribeSessions,
    LeaseGroups,
    OpenSession,
    SaveVersion,
)
from areal_actors.sessions.shards import open_shard_journals, shard_journal


@pytest.fixture
def anyio_backend() -> str:
    """Use one event loop: the router is another process."""
    return "asyncio"


HELLO = [{"role": "user", "content": "Hello"}]


async def talk(base_url: str, *, num_turns: int = 1, messages: list[Any] | None = None) -> list[Any]:
    """Continue a conversation over a new connection for each turn, and return its messages."""
    messages = list(messages or HELLO)
    for _ in range(num_turns):
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=5) as client:
            answer = await client.chat.completions.create(model="any", messages=messages)
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *HELLO]
    return messages


def turns_in(path: Path) -> list[str]:
    """The ids of the turns in a journal."""
    with sqlite3.connect(path) as connection:
        return [row[0] for row in connection.execute("SELECT interaction FROM turns ORDER BY seq")]


@pytest.mark.anyio
async def test_sessions_of_both_processes_are_answered_rewarded_and_trained(tmp_path):
    """Every second session is in the second process; turns are written there, and groups are leased from both."""
    async with open_first(tmp_path) as service, service.second():
        sessions = []
        for number in range(4):
            async with service.client(f"task-{number}") as session:
                await talk(session.base_url, num_turns=3)
                await session.set_last_reward(1.0)
            sessions.append(session)
        assert [0, 1, 0, 1] == [process_of(session.session_id) for session in sessions]
        assert [3, 3, 3, 3] == [(await session.export_episode()).num_turns for session in sessions]
        lease = await service.inference.exports.ask(LeaseGroups(num_groups=4, version=0, max_staleness=1))
        episodes = [episode for group in lease.groups for episode in group.episodes]
        assert {session.session_id: (3, 1.0) for session in sessions} == {
            episode.session: (episode.num_turns, episode.reward) for episode in episodes
        }
        view = await service.inference.sessions.ask(DescribeSessions())
        assert (0, 4) == (view.num_live, view.num_ended)

    assert [6, 6] == [len(turns_in(path)) for path in (service.journal, shard_journal(service.journal, 1))]


@pytest.mark.anyio
async def test_restarted_service_trains_each_session_once(tmp_path):
    """Groups that no step had are delivered again; those whose weights are saved are forgotten in every journal."""
    async with open_first(tmp_path) as service, service.second():
        names = []
        for number in range(4):
            async with service.client(f"task-{number}") as session:
                await talk(session.base_url)
                await session.set_last_reward(1.0)
            names.append(session.session_id)
    async with open_first(tmp_path) as service, service.second():
        exports = service.inference.exports
        trained = []
        for version in range(2):
            lease = await exports.ask(LeaseGroups(num_groups=2, version=version, max_staleness=9))
            trained += [episode.session for group in lease.groups for episode in group.episodes]
            await exports.ask(AcknowledgeLease(lease=lease.id))
        assert sorted(names) == sorted(trained)
        await exports.ask(SaveVersion(version=2))
        with anyio.fail_after(10):
            while (await service.inference.sessions.ask(DescribeSessions())).num_ended:  # noqa: ASYNC110 - other processes
                await anyio.sleep(0.01)
    async with open_first(tmp_path) as service, service.second():
        view = await service.inference.sessions.ask(DescribeSessions())

    assert (0, 0) == (view.num_live, view.num_ended)


@pytest.mark.anyio
async def test_replaced_process_keeps_session_limits(tmp_path):
    """A session is answered as often as its limits allow, also after its process was replaced."""
    limits = EpisodeLimits(max_turns=2)
    async with open_first(tmp_path) as service:
        async with service.second():
            opening = OpenSession(task="a", limits=limits, max_tokens=1)
            opened = [await service.inference.sessions.ask(opening) for _ in range(2)][1]
            url = f"{service.url}/{opened.session}/v1"
            messages = await talk(url)
        async with service.second():
            messages = await talk(url, messages=messages)
            with pytest.raises(openai.BadRequestError, match="limit of 2 turns"):
                await talk(url, messages=messages)
            record = await service.inference.sessions.ask(CollectSession(session=opened.session))

    assert 1 == process_of(opened.session)
    assert [1, 1] == [len(turn.completion.token_ids) for turn in record.interactions if turn.completion is not None]


@pytest.mark.anyio
async def test_fewer_processes_are_refused_while_sessions_exist(tmp_path):
    """Sessions of the missing process would be lost; the error names the number of processes that keeps them."""
    path = tmp_path / "journal.sqlite"
    async with open_first(tmp_path) as service, service.second():
        for _ in range(2):
            await service.inference.sessions.ask(OpenSession(task="a", is_durable=True))
    with pytest.raises(JournalError, match=r"journal-1.sqlite has sessions of process 1 .* Set it to 2 or more"):
        async with open_shard_journals(path, JournalConfig(), num_processes=1):
            pass
    async with open_shard_journals(path, JournalConfig(), num_processes=1, is_kept=False) as journals:
        assert ((), False) == (journals, shard_journal(path, 1).exists())
