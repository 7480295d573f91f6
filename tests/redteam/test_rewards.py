"""Rewards belong to the program that started the session: what its agent tries changes nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from attrs import evolve
from tests.client.service import open_service
from tests.plugins import needs_plugin
from tools.redteam.attacks import CONTROL, FRAMINGS, QUESTION, Attack, Attacker, open_arena
from tools.redteam.files import play_files
from tools.redteam.plays import play, play_restarts

from areal_actors.client import OpenAIProxyClient
from areal_actors.domain import Episode
from areal_actors.errors import SandboxError
from areal_actors.lib.plugins import PluginGroup
from areal_actors.rollouts.runner import RolloutsConfig
from areal_actors.sandbox import SandboxConfig, create_sandbox
from areal_actors.workflows import CommandAgent, CommandConfig, PoolConfig

pytestmark = pytest.mark.anyio


async def test_no_attack_succeeds():
    """Hundreds of requests from a seed; afterwards the runner's reward stands, and nothing else."""
    statuses, successes = await play(seed=7, count=300)

    assert successes == []
    assert statuses[401] > 20
    assert statuses[403] > 2


async def test_no_replay_succeeds_after_a_restart(tmp_path: Path):
    """Requests to sessions that are over, sent before and after a restart from the journal."""
    statuses, successes = await play_restarts(seed=5, count=150, directory=tmp_path, num_restarts=1)

    assert successes == []
    assert statuses[200] > 0  # an end that is repeated is answered, and changes nothing
    assert statuses[401] > 20


async def test_same_attacks_succeed_with_the_key_of_the_session():
    """The attacker is able: it lacks the key and nothing else."""
    async with open_arena() as arena:
        own = evolve(arena.victims[0], completion_key=arena.own["api_key"])
        attacker = Attacker(Random(7), (own, *arena.victims[1:]))
        before, answers = await arena.state(), [await arena.send(attacker.attack()) for _ in range(100)]

        assert any(answer.is_success for answer in answers)
        assert before != await arena.state()


async def test_no_attempt_gets_hold_of_the_files_of_a_grader(tmp_path: Path):
    """Links, hard links and names that change while files are taken; where the agent sees the files, it succeeds."""
    try:
        assert [] == await play_files(7, 50, tmp_path)
        assert [] != await play_files(7, 50, tmp_path, is_visible=True)
    except SandboxError as error:
        pytest.skip(str(error))


async def test_requests_of_the_runner_are_of_no_use_to_another_session():
    """Those to a session that is over, each for each live session: the key is of its own session."""
    async with open_arena() as arena:
        before = await arena.state()
        attacker = Attacker(Random(3), arena.victims, captured=arena.captured)
        for number in range(200):
            await arena.send(attacker.replay(arena.captured[number % len(arena.captured)]))

        assert before == await arena.state()
        assert [False, False, True] == [is_ended for _, is_ended, _ in before]


async def test_malformed_bytes_end_their_connection_only():
    """Bytes behind a request that are not a request; on trio, they ended the server at the second or third time."""
    async with open_arena() as arena:
        attack = Attack(operation="", method="GET", target="/rl/finalize", headers=(), content=b"{}")
        for framing in (*FRAMINGS, *["old"] * 20):
            await arena.send(evolve(attack, framing=framing))
        honest = await arena.complete(arena.own["completion_key"])

    assert honest.status_code == 200


async def test_control_takes_the_key_of_the_session():
    """Without a key of the session 401, with its completion key 403, and the answer says what to send."""
    async with open_arena() as arena:
        key, name = arena.own["completion_key"], arena.own["session_id"]
        bearer = {"authorization": f"Bearer {key}"}
        for operation in CONTROL:
            for path, headers, query, status in (
                (f"/{name}/{operation}", {}, {}, 401),
                (f"/{name}/{operation}", {"authorization": "Bearer DUMMY"}, {}, 401),
                (f"/{operation}", bearer, {}, 403),
                (f"/{name}/{operation}", bearer, {}, 403),
                (f"/{operation}", {"x-api-key": key}, {}, 403),
                (f"/{operation}", bearer, {"session_id": name}, 403),
            ):
                body = {"reward": 1000, "final_reward": 1000}
                answer = await arena.http.post(path, json=body, headers=headers, params=query)

                assert answer.status_code == status
                assert "api_key that start_session returned" in answer.json()["error"]["message"]
        assert (name, False, (None, None)) == (await arena.state())[0]


async def test_admin_key_is_no_key_of_a_session():
    """Every plain request of the administrator would be a turn of that session."""
    async with open_service() as inference, httpx.AsyncClient(base_url=inference.endpoint.url) as http:
        admin = inference.endpoint.admin_key
        headers = {"authorization": f"Bearer {admin}"}
        refused = [
            await http.post("/rl/start_session", json={"api_key": admin}, headers=headers),
            await http.get("/rl/start_session", params={"api_key": admin}, headers=headers),
        ]

    assert [400, 400] == [answer.status_code for answer in refused]
    assert "admin key" in refused[0].json()["error"]["message"]
    assert admin not in refused[0].text


async def test_completion_key_starts_no_session_of_its_own():
    """Neither as what opens ``start_session``, nor as the session key of another session."""
    async with open_arena() as arena:
        key = {"authorization": f"Bearer {arena.own['completion_key']}"}
        admin = {"authorization": f"Bearer {arena.admin_key}"}
        ended = arena.victims[2].completion_key
        started = await arena.http.post("/rl/start_session", headers=key)
        brought = await arena.http.post("/rl/start_session", json={"api_key": ended}, headers=admin)

    assert (401, 409) == (started.status_code, brought.status_code)


# ------------------------------------------------------------------------------------------------- agents of a run


class Forger:
    """Rewards its first answer with 1000 by every way that it knows, and returns 0."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    async def run(self, data: Any, base_url: str, api_key: str, http_client: Any, **extra_kwargs: Any) -> float:
        root = base_url.removesuffix("/v1")
        session = root.rsplit("/", 1)[1]
        bearer = {"authorization": f"Bearer {api_key}"}
        first = await http_client.post(f"{base_url}/chat/completions", json=QUESTION, headers=bearer)
        wanted = {"completion_id": first.json()["id"], "reward": 1000.0, "final_reward": 1000.0}
        top = root.removesuffix(f"/{session}")
        for url in (root, f"{root}/v1", top, f"{top}/v1"):
            for operation in CONTROL:
                for headers in ({}, bearer, {"x-api-key": api_key}):
                    answer = await http_client.post(
                        f"{url}/{operation}", json=wanted | {"session_id": session}, headers=headers
                    )
                    self.statuses.append(answer.status_code)
        await http_client.post(f"{base_url}/chat/completions", json=QUESTION, headers=bearer)
        return 0.0


async def play_agent(agent: Any, config: RolloutsConfig | None = None) -> Episode:
    """One episode by the runner of runs."""
    async with open_service() as inference, inference.rollouts(config=config) as engine:
        (episode,) = (await engine.submit({"n": 1}, agent).group()).episodes
    return episode


async def test_agent_does_not_reward_itself():
    """The episode counts what the runner was told in the end, and the session lives until then."""
    agent = Forger()
    episode = await play_agent(agent)

    assert set(agent.statuses) == {401, 403}
    assert (0.0, 2, None) == (episode.reward, episode.num_turns, episode.failure)


async def test_agent_may_reward_itself_where_it_is_told_so():
    """The setting gives it the session's own key; then it may return nothing."""

    class Grader:
        async def run(self, data: Any, base_url: str, api_key: str, http_client: Any, **extra_kwargs: Any) -> Any:
            headers = {"authorization": f"Bearer {api_key}"}
            await http_client.post(f"{base_url}/chat/completions", json=QUESTION, headers=headers)
            url = base_url.removesuffix("/v1")
            await http_client.post(f"{url}/rl/set_reward", json={"reward": 0.25}, headers=headers)
            return {}

    assert 0.25 == (await play_agent(Grader(), RolloutsConfig(agents_may_reward=True))).reward


async def test_command_finds_no_key_but_its_own(monkeypatch: pytest.MonkeyPatch):
    """Of all that its environment holds, nothing rewards the episode; keys of the trainer's own are not there."""
    monkeypatch.setenv("AREAL_API_KEY", "sk-of-the-trainer")
    monkeypatch.setenv("AREAL_ADMIN_KEY", "sk-admin-of-the-trainer")
    script = """
import json, os, sys, urllib.request, urllib.error
url, found = os.environ["ANTHROPIC_BASE_URL"], sorted(set(os.environ.values()), key=len)
def post(path, body, key):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"authorization": "Bearer " + key})
    try:
        return urllib.request.urlopen(request).status
    except (urllib.error.HTTPError, ValueError, UnicodeError) as error:
        return getattr(error, "code", 0)
assert post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "") == 200
keys = [value for value in found if value.isprintable() and value.isascii()]
statuses = {post("/rl/set_reward", {"reward": 1000}, key) for key in keys}
assert statuses <= {401, 403}, statuses
assert not any("of-the-trainer" in value for value in os.environ.values())
print(0.5)
"""
    async with CommandAgent.open(CommandConfig(command=(sys.executable, "-c", script)), PoolConfig()) as agent:
        episode = await play_agent(agent)

    assert (0.5, None) == (episode.reward, episode.failure)


async def test_trusted_client_gives_its_agent_the_lesser_key():
    """It rewards with the session's key by itself; neither key is in what is shown of it."""
    async with open_service() as inference:
        url, admin = inference.endpoint.url, inference.endpoint.admin_key
        async with OpenAIProxyClient(url, admin_key=admin) as session, httpx.AsyncClient() as http:
            headers = {"authorization": f"Bearer {session.completion_key}"}
            answer = await http.post(f"{session.base_url}/chat/completions", json=QUESTION, headers=headers)
            await session.set_reward(answer.json()["id"], 0.5)
            shown = json.dumps([repr(session), repr(inference)])
        episode = await session.export_episode()

    assert 0.5 == episode.reward
    assert session.completion_key not in shown
    assert session.api_key not in shown


@needs_plugin(PluginGroup.SANDBOXES, "bubblewrap")
async def test_boxed_command_finds_nothing_that_rewards_it():
    """Neither in its environment, nor in /proc, nor in files, nor at abstract sockets; its last line counts."""
    config = SandboxConfig(backend="bubblewrap")
    try:
        create_sandbox(config.backend).check(config)
    except SandboxError as error:
        pytest.skip(str(error))
    script = """
import json, os, pathlib, re, socket, sys, urllib.request, urllib.error
url, texts = os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), list(os.environ.values())
for path in [*pathlib.Path("/proc").glob("[0-9]*/*"), *pathlib.Path.home().rglob("*.key")]:
    try:
        texts.append(path.read_bytes()[:100_000].decode(errors="replace") if path.is_file() else os.readlink(path))
    except OSError:
        pass
for name in set(re.findall(r" @(\\S+)$", pathlib.Path("/proc/net/unix").read_text(), re.MULTILINE)):
    with socket.socket(socket.AF_UNIX) as stream:
        assert stream.connect_ex(b"\\0" + name.encode()), name
for process in pathlib.Path("/proc").glob("[0-9]*"):
    link = process / "root" / "tmp" / "reward"
    try:
        (pathlib.Path(os.environ["TMPDIR"] if "TMPDIR" in os.environ else "/tmp") / process.name).symlink_to(link)
    except OSError:
        pass
def post(path, body, key):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"authorization": "Bearer " + key})
    try:
        return urllib.request.urlopen(request).status
    except (urllib.error.HTTPError, ValueError, UnicodeError) as error:
        return getattr(error, "code", 0)
asked = {"messages": [{"role": "user", "content": "x"}]}
assert post("/v1/chat/completions", asked, os.environ["OPENAI_API_KEY"]) == 200
keys = {key for text in texts for key in re.findall(r"[A-Za-z0-9_-]{16,80}", text)}
tried = [post("/rl/" + name, {"reward": 1000, "final_reward": 1000}, key) for key in sorted(keys)[:200]
         for name in ("set_reward", "finalize")]
assert tried and set(tried) <= {0, 401, 403}, set(tried)
print(0.5)
"""
    command = CommandConfig(command=(sys.executable, "-c", script))
    async with CommandAgent.open(command, PoolConfig(), sandbox=config) as agent:
        episode = await play_agent(agent)

    assert (0.5, None) == (episode.reward, episode.failure)
