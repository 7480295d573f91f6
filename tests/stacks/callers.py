"""Those who ask: requests in tasks of their own, what they ended in, and a scope to hang up with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from tests.stacks.inference_stack import InferenceStack, encode, open_inference_stack, say

from areal_actors.domain import Answer, Attempt, CompletionRequest, Credential, Ints, Sampling, SessionId
from areal_actors.messages import Complete, StreamComplete
from areal_actors.testing.engines import EchoEngine

FIRST, RETRY = Attempt(fingerprint="f"), Attempt(fingerprint="f", number=1)
NAMED = Attempt(fingerprint="f", idempotency_key="k")
WAYS = ("complete", "stream")


class Asking:
    """A request on its way in a task of its own: what it ended in, and a scope to hang up with."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.answers: tuple[Answer, ...] = ()
        self.error: Exception | None = None
        self.heard: list[object] = []

    async def complete(self, inference: InferenceStack, session: SessionId, **options: object) -> None:
        with self.scope:
            try:
                self.answers = await inference.complete(session, say("why?"), **options)
            except Exception as error:  # noqa: BLE001 - looked at by the test
                self.error = error

    async def stream(self, inference: InferenceStack, session: SessionId, **options: object) -> None:
        with self.scope:
            try:
                async with inference.sessions.stream(stream_request(session, **options)) as items:
                    async for item in items:
                        self.heard.append(item)
            except Exception as error:  # noqa: BLE001 - looked at by the test
                self.error = error


@asynccontextmanager
async def open_waiting() -> AsyncIterator[tuple[InferenceStack, SessionId, Asking]]:
    """A session whose request waits for an engine that says "late" when it is released."""
    engine = EchoEngine(lambda _: encode("late"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        asking = Asking()
        tasks.start_soon(lambda: asking.complete(inference, session))
        await anyio.wait_all_tasks_blocked()
        yield inference, session, asking


def stream_request(session: SessionId, **options: object) -> StreamComplete:
    request = CompletionRequest(messages=say("why?"), sampling=Sampling(max_new_tokens=64), **options)
    return StreamComplete(credential=Credential(session=session), request=request)


async def ask_in_vain(inference: InferenceStack, session: SessionId, **options: object) -> Exception:
    asking = Asking()
    await asking.complete(inference, session, **options)
    assert asking.error is not None
    return asking.error


class Caller:
    """A request in a task of its own, sent in one way or the other: what was heard, and a scope to hang up with."""

    def __init__(
        self, inference: InferenceStack, session: SessionId, way: str, attempt: Attempt | None, **options: object
    ) -> None:
        self.scope = anyio.CancelScope()
        self.heard: list[object] = []
        self.error: Exception | None = None
        self.done = anyio.Event()
        defaults = {"messages": say("why?"), "sampling": Sampling(max_new_tokens=64)}
        request = CompletionRequest(**defaults | options)
        kind = {"complete": Complete, "stream": StreamComplete}[way]
        self._inference = inference
        self._message = kind(credential=Credential(session=session), request=request, attempt=attempt)

    @property
    def answers(self) -> list[Answer]:
        return [item for item in self.heard if isinstance(item, Answer)]

    @property
    def ids(self) -> list[str]:
        return [answer.interaction for answer in self.answers]

    async def __call__(self) -> None:
        with self.scope:
            try:
                if isinstance(self._message, Complete):
                    self.heard.extend(await self._inference.sessions.ask(self._message))
                    return
                async with self._inference.sessions.stream(self._message) as items:
                    async for item in items:
                        self.heard.append(item)
            except Exception as error:  # noqa: BLE001 - looked at by the test
                self.error = error
            finally:
                self.done.set()


async def call(
    inference: InferenceStack, session: SessionId, way: str, attempt: Attempt | None, **options: object
) -> Caller:
    caller = Caller(inference, session, way, attempt, **options)
    await caller()
    return caller


async def turns(inference: InferenceStack, session: SessionId):
    return (await inference.record(session)).interactions


def same(one: Answer, other: Answer) -> bool:
    """Return whether the two answers are equal."""
    columns = ("token_ids", "logprobs", "raw_logprobs", "versions")
    equal = all(getattr(one.completion, name).tolist() == getattr(other.completion, name).tolist() for name in columns)
    return equal and (one.interaction, one.message, one.usage) == (other.interaction, other.message, other.usage)


def ids(array: Ints) -> list[int]:
    return [int(i) for i in array]
