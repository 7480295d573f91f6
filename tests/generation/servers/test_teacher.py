"""A teacher behind a URL, over real HTTP in each of the forms that servers have: scores, retries and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import anyio
import numpy as np
import pytest

from areal_actors.domain import Episode, Group, GroupId, InteractionId, Problem, SessionId, Trajectory, as_ints
from areal_actors.errors import ConfigError, EngineError
from areal_actors.generation.servers import teacher as teacher_module
from areal_actors.generation.servers.teacher import Probe, open_teacher
from areal_actors.training.phases import GroupTeacher, teach_group

pytestmark = pytest.mark.anyio

PROBES = (Probe(token_ids=as_ints([3, 4, 5]), texts=["t3", "t4", "t5"]),)


def logprob(ids: list[int], place: int) -> float:
    """What the teacher of the tests says of a token: it depends on all before it."""
    return -(1 + sum(ids[: place + 1]) % 11) / 16


def answer_vllm(path, body, text):
    """The form of vLLM."""
    if path != "/v1/completions":
        return 404, {}
    ids = body["prompt"]
    others = {"99": {"logprob": -0.01, "decoded_token": "other"}}
    entries = [{str(t): {"logprob": logprob(ids, n), "decoded_token": text(t)}, **others} for n, t in enumerate(ids)]
    return 200, {"choices": [{"text": "x", "prompt_logprobs": [None, *entries[1:]]}]}


def answer_sglang(path, body, text):
    """The form of SGLang, whose completions know no logprobs of prompts."""
    if path != "/generate":
        return 200, {"choices": [{"text": "x"}]}
    ids = body["input_ids"]
    entries = [[None if n == 0 else logprob(ids, n), t, text(t)] for n, t in enumerate(ids)]
    return 200, {"text": "x", "meta_info": {"input_token_logprobs": entries}}


def answer_echo(path, body, text):
    """The form of OpenAI's own completions; the sampled token follows the prompt."""
    if path != "/v1/completions" or not body.get("echo"):
        return 400, {"error": {"message": "prompt_logprobs is unknown"}}
    ids = body["prompt"]
    found = [None if n == 0 else logprob(ids, n) for n in range(len(ids))]
    return 200, {"choices": [{"logprobs": {"token_logprobs": [*found, -1.0], "tokens": [*map(text, ids), "x"]}}]}


@contextmanager
def serving(answer, *, text=lambda token: f"t{token}", failures=()) -> Iterator[tuple[str, list]]:
    """A server on a free port; it answers with ``failures`` first, once it has been probed. Yields URL and bodies."""
    bodies: list = []
    waiting = list(failures)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(200, {"data": [{"id": "the-teacher"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            bodies.append(body)
            if waiting and len(body.get("prompt") or body.get("input_ids")) != 3:
                self.reply(waiting.pop(0), {"error": {"message": "not now"}})
            else:
                self.reply(*answer(self.path, body, text))

        def reply(self, status, document):
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("answer", [answer_vllm, answer_sglang, answer_echo])
@pytest.mark.parametrize("suffix", ["", "/v1/"])
async def test_every_form_gives_the_scores_of_the_prompt(answer, suffix):
    """Asked by ids, with the server's own name of the model; the first token has none, which is 0."""
    ids = [5, 9, 2, 7]
    with serving(answer) as (url, bodies):
        async with open_teacher(url + suffix, probes=PROBES) as teacher:
            scores = await teacher.score(as_ints(ids))

    assert scores.dtype == np.float32
    assert scores.tolist() == [0.0, *(logprob(ids, place) for place in (1, 2, 3))]
    assert bodies[-1].get("prompt", bodies[-1].get("input_ids")) == ids
    assert bodies[-1].get("model") == (None if answer is answer_sglang else "the-teacher")


async def test_temporary_failures_are_retried(monkeypatch):
    """Overloads and errors of the server; a request that is at fault is not repeated."""
    monkeypatch.setattr(teacher_module, "_FIRST_WAIT_SECONDS", 0.001)
    with serving(answer_vllm, failures=[503, 429, 500]) as (url, bodies):
        async with open_teacher(url, probes=PROBES) as teacher:
            scores = await teacher.score(as_ints([1, 2]))
    assert len(scores) == 2
    assert len([body for body in bodies if len(body["prompt"]) == 2]) == 4

    with serving(answer_vllm, failures=[400]) as (url, _):
        async with open_teacher(url, probes=PROBES) as teacher:
            with pytest.raises(EngineError, match=r"cannot score a row of 2 tokens: .*answered 400: not now"):
                await teacher.score(as_ints([1, 2]))
    with serving(answer_vllm, failures=[503] * 6) as (url, _):
        async with open_teacher(url, probes=PROBES) as teacher:
            with pytest.raises(EngineError, match=r"did not score a row of 2 tokens in 6 tries: .*503: not now"):
                await teacher.score(as_ints([1, 2]))


async def test_another_tokenizer_is_refused():
    """By the text of its tokens; so are ids that it does not have, and servers without logprobs of prompts."""
    with (
        serving(answer_vllm, text=lambda token: f"u{token}") as (url, _),
        pytest.raises(
            ConfigError, match=r"has another tokenizer than the student: 2 of 2 token ids differ \(4 is 't4' and"
        ),
    ):
        async with open_teacher(url, probes=PROBES):
            pass
    longer = Probe(token_ids=as_ints([3, 4, 5, 6]), texts=["t3", "t4", "t5", "t6"])
    with (
        serving(answer_vllm, failures=[400]) as (url, _),
        pytest.raises(ConfigError, match=r"the server refuses token ids of the student, .*answered 400: not now"),
    ):
        async with open_teacher(url, probes=(*PROBES, longer)):
            pass
    with (
        serving(lambda *_: (200, {"choices": [{"text": "x"}]})) as (url, _),
        pytest.raises(
            ConfigError, match=r"returns no log-probabilities of prompts .*Serve the teacher with vLLM or SGLang"
        ),
    ):
        async with open_teacher(url, probes=PROBES):
            pass


async def test_server_that_is_away_is_named():
    """With its URL, at once."""
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9/v1/models cannot be reached"):
        async with open_teacher("http://127.0.0.1:9", probes=PROBES):
            pass


# ------------------------------------------------------------------------------------------------------ groups


def row_of(ids, mask, *, predecessors=None):
    """A row, whose scores are not known."""
    return Trajectory(
        session=SessionId("s"),
        interactions=(InteractionId("i"),),
        input_ids=ids,
        loss_mask=mask,
        logprobs=np.zeros(len(ids)),
        versions=np.where(np.array(mask) == 1, 0, -1),
        returns=np.zeros(len(ids)),
        turns=np.where(np.array(mask) == 1, 0, -1),
        reward=0.0,
        predecessors=predecessors,
    )


def group_of(*rows):
    """A group of one episode."""
    episode = Episode(session=SessionId("s"), member=0, trajectories=rows)
    return Group(id=GroupId("g"), problem=Problem(position=0, data={}), episodes=(episode,))


async def score(ids):
    """The formula, without a server."""
    return np.array([0.0, *(logprob(ids.tolist(), place) for place in range(1, len(ids)))], dtype=np.float32)


async def test_conversation_is_scored_once():
    """The rows of earlier turns are read from the longest; branches of a tree are sequences of their own."""
    turns = [row_of([1, 2, 3], [0, 1, 1]), row_of([1, 2, 3, 4, 5], [0, 0, 0, 0, 1]), row_of([7, 8], [0, 1])]
    tree = row_of([1, 2, 3, 6], [0, 1, 1, 1], predecessors=[-1, 0, 1, 1])
    asked = []

    async def count(ids):
        asked.append(ids.tolist())
        return await score(ids)

    taught = await teach_group(group_of(*turns, tree), count)

    assert sorted(asked) == [[1, 2, 3, 4, 5], [1, 2, 6], [7, 8]]
    for row in taught.rows[:3]:
        expected = np.where(row.loss_mask == 1, await score(row.input_ids), 0)
        assert row.teacher_logprobs.tolist() == expected.tolist()
    assert taught.rows[3].teacher_logprobs.tolist() == [
        0.0, logprob([1, 2], 1), logprob([1, 2, 3], 2), logprob([1, 2, 6], 2),
    ]  # fmt: skip
    assert await teach_group(taught, count) is taught


async def test_only_groups_of_distillation_steps_are_scored():
    """A group of version v trains step v + 1, or one that is at most so much later as it may be stale."""
    teacher = GroupTeacher(score=score, first_step=3, last_step=4)
    group = group_of(row_of([1, 2], [0, 1]))

    scored = [
        (await teacher.teach(group, version=version, max_staleness=1)).rows[0].teacher_logprobs is not None
        for version in range(6)
    ]

    assert scored == [False, True, True, True, False, False]


async def test_no_more_requests_than_allowed_run_at_a_time():
    """A teacher that is shared is not flooded."""
    running, most = 0, 0
    with serving(answer_vllm) as (url, _):
        async with open_teacher(url, probes=PROBES, max_concurrent=2) as teacher:
            original = teacher._ask

            async def watched(ids):
                nonlocal running, most
                running, most = running + 1, max(most, running + 1)
                try:
                    return await original(ids)
                finally:
                    running -= 1

            teacher._ask = watched
            async with anyio.create_task_group() as tasks:
                for token in range(6):
                    tasks.start_soon(teacher.score, as_ints([token, 1, 2, 3]))
    assert most == 2
