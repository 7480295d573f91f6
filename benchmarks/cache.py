"""What it costs to remember: CPU per inserted call, memory per stored call, and training rows of a long conversation.

The baselines run in the same process a moment before: a scan over all earlier histories for the longest prefix, and
rows that are spliced turn by turn from the parent's row.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from secrets import token_urlsafe

import numpy as np
from attrs import define
from benchmarks.harness import Result, cpu_us_per_operation

from areal_actors.cache import ConversationTree, SessionStore, export_trajectories, plan_prompt, to_arrays
from areal_actors.domain import (
    ChatMessage,
    Completion,
    CompletionRequest,
    Credential,
    FinishReason,
    Interaction,
    InteractionId,
    Ints,
    SessionId,
    TokenHash,
    as_ints,
    create_token_hash,
    digest_turn,
)

_RANDOM = np.random.default_rng(7)
_CHARACTERS_PER_TOKEN = 4


@define
class FixedRenderer:
    """So many random ids, whatever the messages: rendering is measured elsewhere."""

    prompt: Ints
    suffix: Ints
    stop_token_ids: tuple[int, ...] = (2,)

    @classmethod
    def of(cls, num_prompt: int = 20, num_suffix: int = 20) -> FixedRenderer:
        """With prompts and suffixes of these lengths."""
        return cls(*(as_ints(_RANDOM.integers(3, 50_000, size)) for size in (num_prompt, num_suffix)))

    def render(self, *_: object, **__: object) -> Ints:
        """A whole prompt."""
        return self.prompt

    def extend(self, **_: object) -> Ints:
        """A suffix."""
        return self.suffix


def _text(num_tokens: int) -> str:
    return "".join(map(chr, _RANDOM.integers(97, 122, num_tokens * _CHARACTERS_PER_TOKEN)))


def _user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def _answer(text: str) -> ChatMessage:
    return ChatMessage(role="assistant", content=text)


def _completion(num_tokens: int) -> Completion:
    logprobs = -_RANDOM.random(num_tokens)
    return Completion(
        token_ids=_RANDOM.integers(3, 50_000, num_tokens),
        logprobs=logprobs,
        raw_logprobs=logprobs * 1.1,
        versions=np.zeros(num_tokens),
        finish=FinishReason.STOP,
    )


def _fan_out(size: int) -> list[tuple[tuple[ChatMessage, ...], str]]:
    """Calls that share their instructions only."""
    system = ChatMessage(role="system", content="You are a helpful assistant.")
    return [((system, _user(f"question {i}")), f"answer {i}") for i in range(size)]


def _chain(size: int) -> list[tuple[tuple[ChatMessage, ...], str]]:
    """The requests of one conversation; every request brings new objects, as it does over HTTP."""
    calls = []
    for turn in range(size):
        messages = [_user("question 0")]
        for i in range(turn):
            messages += [_answer(f"answer {i}"), _user(f"question {i + 1}")]
        calls.append((tuple(messages), f"answer {turn}"))
    return calls


def _insert_all(calls: list[tuple[tuple[ChatMessage, ...], str]]) -> ConversationTree:
    tree, renderer, completion = ConversationTree(SessionId("benchmark")), FixedRenderer.of(), _completion(10)
    for messages, answer in calls:
        name = InteractionId(f"chatcmpl-{len(tree):029x}")
        tree.begin(name, plan_prompt(tree, renderer, CompletionRequest(messages=messages)))
        tree.complete(name, completion, _answer(answer))
    return tree


def _scan_all(calls: list[tuple[tuple[ChatMessage, ...], str]]) -> list[int | None]:
    """The baseline: compare with every earlier history, message by message; nothing is rendered or stored."""
    histories: list[list[ChatMessage]] = []
    parents: list[int | None] = []
    for messages, answer in calls:
        best = None
        for position, history in enumerate(histories):
            is_longer = best is None or len(history) > len(histories[best])
            if is_longer and len(history) <= len(messages) and all(a == b for a, b in zip(history, messages)):  # noqa: B905
                best = position
        parents.append(best)
        histories.append([*messages, _answer(answer)])
    return parents


def _insertions(name: str, calls: list[tuple[tuple[ChatMessage, ...], str]], *, gate: float | None) -> list[Result]:
    size = len(calls)
    scan = cpu_us_per_operation(lambda: _scan_all(calls), num_operations=size, rounds=1)
    ours = cpu_us_per_operation(lambda: _insert_all(calls), num_operations=size, rounds=3)
    detail = {"calls": size, "total_seconds": ours * size / 1e6}
    baseline = f"{name}, prefix scan"
    return [
        Result(benchmark="cache", name=baseline, value=scan, unit="µs/call"),
        Result(benchmark="cache", name=f"{name}, tree", value=ours, unit="µs/call", detail=detail),
        Result(benchmark="cache", name=f"{name}, ratio", value=ours / scan, unit="ratio", gate=gate, baseline=baseline),
    ]


def _bytes_per_call(num_prompt: int, num_output: int, *, calls: int) -> float:
    """Bytes that stay allocated per call: ids, log-probabilities, versions, text, indices."""
    tree, renderer = ConversationTree(SessionId("benchmark")), FixedRenderer.of(num_prompt)

    def insert() -> None:
        name = InteractionId(f"chatcmpl-{len(tree):029x}")
        request = CompletionRequest(messages=(_user(_text(num_prompt)),))
        tree.begin(name, plan_prompt(tree, renderer, request))
        tree.complete(name, _completion(num_output), _answer(_text(num_output)))

    insert()
    gc.collect()
    tracemalloc.start()
    for _ in range(calls):
        insert()
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / calls


def _memory(calls: int) -> list[Result]:
    return [
        Result(
            benchmark="cache",
            name=f"memory, {num_prompt} + {num_output} tokens",
            value=_bytes_per_call(num_prompt, num_output, calls=calls),
            unit="bytes/call",
            gate=gate,
        )
        for num_prompt, num_output, gate in ((200, 50, 4_500), (4000, 300, 40 * 1024))
    ]


def _splice(turns: Sequence[Interaction]) -> list[list[int]]:
    """The baseline: every row is the parent's row, copied, and a bit more; the leaf's is the one that is wanted."""
    row: list[list[int]] = [[], [], []]
    for turn in turns:
        assert turn.completion is not None
        prompt, output = turn.prompt_suffix.tolist(), turn.completion.token_ids.tolist()
        versions = turn.completion.versions.tolist()
        row = [
            row[0] + prompt + output,
            row[1] + [0] * len(prompt) + [1] * len(output),
            row[2] + [-1] * len(prompt) + versions,
        ]
    return row


def _concat(num_turns: int, *, repeats: int) -> list[Result]:
    record = _insert_all(_chain(num_turns)).snapshot()

    def repeated(operation: Callable[[], object]) -> Callable[[], object]:
        return lambda: [operation() for _ in range(repeats)]

    def export() -> object:
        return to_arrays(export_trajectories(record, discount=0.9, style="concat").trajectories)

    spliced = cpu_us_per_operation(repeated(lambda: _splice(record.interactions)), num_operations=repeats, rounds=2)
    ours = cpu_us_per_operation(repeated(export), num_operations=repeats, rounds=3)
    name = f"concat arrays of {num_turns} turns"
    return [
        Result(benchmark="cache", name=f"{name}, spliced rows", value=spliced / 1e3, unit="ms"),
        Result(benchmark="cache", name=name, value=ours / 1e3, unit="ms", gate=20.0),
        Result(
            benchmark="cache",
            name=f"{name}, ratio",
            value=ours / spliced,
            unit="ratio",
            baseline=f"{name}, spliced rows",
        ),
    ]


def _digests() -> list[Result]:
    """What binds rows to the answers costs per turn: the hash of the parent's ids goes on, then that of the columns."""
    results = []
    for num_prompt, num_output, gate in ((20, 10, 10.0), (4000, 300, 40.0)):
        suffix, completion = as_ints(_RANDOM.integers(3, 50_000, num_prompt)), _completion(num_output)
        parent = create_token_hash()

        def digest(suffix: Ints = suffix, completion: Completion = completion, parent: TokenHash = parent) -> None:
            for _ in range(2000):
                tokens = parent.copy()
                tokens.update(suffix.data)
                tokens.update(completion.token_ids.data)
                digest_turn(InteractionId("chatcmpl-0"), tokens.hexdigest(), completion)

        cost = cpu_us_per_operation(digest, num_operations=2000, rounds=5)
        name = f"digest of a turn, {num_prompt} + {num_output} tokens"
        results.append(Result(benchmark="cache", name=name, value=cost, unit="µs/turn", gate=gate))
    return results


def _keys() -> list[Result]:
    """What it costs to find the session and the role of a request's key, in a session with two roles."""
    store = SessionStore(token_factory=lambda: token_urlsafe(24))
    issued = store.create("keys", now=0.0, roles=("judge", "user"))
    results = []
    for name, key in (("the agent", issued.completion_key), ("a role", issued.role_keys["user"])):
        credential = Credential(session=issued.id, key=key, is_capability=True)

        def find(credential: Credential = credential) -> None:
            for _ in range(2000):
                store.resolve(credential).role_of_key(credential.key)

        cost = cpu_us_per_operation(find, num_operations=2000, rounds=5)
        results.append(Result(benchmark="cache", name=f"key of {name}", value=cost, unit="µs/turn", gate=3.0))
    return results


def run(quick: bool) -> list[Result]:  # noqa: FBT001
    """All figures; ``quick`` takes a fifth of the calls."""
    fan_out, chain = (1000, 100) if quick else (5000, 400)
    gate = None if quick else 1.0  # the scan is quadratic: among few calls it is as quick
    return [
        *_insertions(f"insert, fan-out of {fan_out}", _fan_out(fan_out), gate=gate),
        *_insertions(f"insert, chain of {chain}", _chain(chain), gate=gate),
        *_concat(chain, repeats=5),
        *_memory(400),
        *_digests(),
        *_keys(),
    ]


if __name__ == "__main__":
    for result in run(quick=False):
        gate = "" if result.gate is None else f"gate {result.gate:g} {'ok' if result.passed else 'MISSED'}"
        print(f"{result.name:50} {result.value:12.3f} {result.unit:10} {gate}")
