"""Several proxies of one service: a session is at one of them, and continues if that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import anyio
import openai
import pytest
from attrs import evolve
from tests.proxy.stack import renderer, sampled

from areal_actors.cache.session import process_of
from areal_actors.client import OpenAIProxyClient
from areal_actors.config import create_config, save_config
from areal_actors.messages import AwaitProxies
from areal_actors.proxy import ProxyConfig
from areal_actors.run.control_plane import open_proxies
from areal_actors.run.inference import InferenceConfig, open_actors
from areal_actors.sessions.intake import IntakeConfig
from areal_actors.testing.engines import EchoEngine, script_answers

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.anyio
async def test_killed_process_continues_its_sessions(tmp_path, anyio_backend_name):
    """A session of each process, each turn over a new connection; a killed process costs its clients retries only."""
    settings = {
        "experiment_name": "e",
        "total_steps": 1,
        "model": "tiny",
        "rollout": {},
        "proxy": {"num_processes": 2},
    }
    save_config(create_config(settings), tmp_path / "config.yaml")
    engine = EchoEngine(script_answers(sampled("Hi")), vocab_size=renderer().vocab_size)
    config = InferenceConfig(
        proxy=evolve(ProxyConfig(), num_processes=2, drain_seconds=0.0), intake=IntakeConfig(grace_seconds=0.0)
    )
    async with (
        open_actors(config, engine=engine, renderer=renderer()) as inference,
        open_proxies(
            inference.actors,
            inference.endpoint,
            num_processes=2,
            config=tmp_path / "config.yaml",
            logs=tmp_path,
            first=inference.process,
        ) as directory,
    ):
        url, key = inference.endpoint.url, inference.endpoint.admin_key
        with anyio.fail_after(60):
            ready = await directory.ask(AwaitProxies(known=()))
        async with OpenAIProxyClient(url, admin_key=key) as here, OpenAIProxyClient(url, admin_key=key) as there:
            messages = list(HELLO)
            for number in range(12):
                if number == 6:
                    _kill_children()
                    await directory.ask(AwaitProxies(known=ready))
                # On trio, the killed process is not awaited: it takes seconds to start, and once is enough.
                for session in (here, there) if number < 6 or anyio_backend_name == "asyncio" else (here,):
                    async with openai.AsyncOpenAI(base_url=session.base_url, api_key="none", max_retries=5) as client:
                        answer = await client.chat.completions.create(model="any", messages=messages)
                messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *HELLO]
            if anyio_backend_name == "asyncio":
                await there.set_last_reward(0.5)
                moved = await there.export_episode(style="concat")
                assert (12, 1, 0.5) == (moved.num_turns, len(moved.trajectories), moved.reward)
            await here.set_last_reward(1.0)
            episode = await here.export_episode(style="concat")
            assert (0, 1) == (process_of(here.session_id), process_of(there.session_id))

    assert (12, 1) == (episode.num_turns, len(episode.trajectories))
    assert [] == _children()


def _children() -> list[int]:
    """Workers that this process has started and that live."""
    found = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "areal_actors.worker"], capture_output=True, text=True, check=False
    )
    return [int(line) for line in found.stdout.split()]


def _kill_children() -> None:
    for pid in _children():
        os.kill(pid, signal.SIGKILL)


def test_worker_ends_with_its_parent():
    """Its standard input closes, also when nothing can be connected to."""
    spec = b'{"name": "p", "life": 1, "addresses": ["unix:/nowhere/at/all.sock"], "secret": "%s"}\n' % (b"00" * 32)
    command = [sys.executable, "-m", "areal_actors.worker"]
    ended = subprocess.run(command, input=spec, capture_output=True, timeout=120, check=False)

    assert ended.returncode == 0


def test_worker_started_by_hand_explains_itself():
    """What it is told cannot be read: it says who starts workers."""
    command = [sys.executable, "-m", "areal_actors.worker"]
    ended = subprocess.run(command, input=b"hello\n", capture_output=True, timeout=120, check=False)

    assert ended.returncode == 1
    assert b"areal-actors train, with scheduler.roles" in ended.stderr
