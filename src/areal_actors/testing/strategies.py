"""Hypothesis strategies for conversations, sessions and rewards, and the ways in which clients echo an answer.

They feed property tests of this library and of code that uses it: test a new reward rule with ``reward_trees()``, a new
exporter with ``session_records()``, a client or a matcher with ``conversations()`` and ``ECHO_STYLES``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import evolve
from hypothesis import strategies as st

from areal_actors.cache.rewards import RewardTree
from areal_actors.domain import (
    ChatMessage,
    Completion,
    FinishReason,
    ForkReason,
    Interaction,
    InteractionId,
    InteractionStatus,
    RewardScope,
    SamplingDistribution,
    SessionId,
    SessionRecord,
    ToolCall,
)

_MAX_TOKEN = 200

# ----------------------------------------------------------------------------------------------- conversations


def _texts() -> st.SearchStrategy[str]:
    """Return short texts, with characters that often break serialisers and templates."""
    return st.text(st.sampled_from('ab \n"\\{}<>é漢🙂\u2028'), max_size=6)


def tool_calls() -> st.SearchStrategy[ToolCall]:
    """Calls of one of three tools; ids are drawn from a large space but may coincide.

    Arguments are JSON objects as a model might write them, and sometimes text that is not JSON.
    """
    values = st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from([0.5, 2.0, -0.0]) | _texts()
    objects = st.dictionaries(st.sampled_from(["a", "b", "ü"]), values | st.lists(values, max_size=2), max_size=3)
    written = st.builds(
        lambda value, separators: json.dumps(value, separators=separators),
        objects,
        st.sampled_from([(", ", ": "), (",", ":"), (",  ", ":  ")]),
    )
    return st.builds(
        ToolCall,
        id=st.integers(0, 2**32).map("call_{:08x}".format),
        name=st.sampled_from(["look", "add", "send"]),
        # Also text that is cut off, no JSON, or nested more deeply than parsers recurse.
        arguments=written | st.sampled_from(["", "{", '{"a": NaN}', "[" * 2000]),
    )


def chat_messages(role: str | None = None) -> st.SearchStrategy[ChatMessage]:
    """Messages of ``role``, or of any role; answers have text, tool calls, reasoning, or nothing at all."""
    if role is None:
        return st.sampled_from(["system", "user", "assistant", "tool"]).flatmap(chat_messages)
    if role == "assistant":
        return st.builds(
            ChatMessage,
            role=st.just(role),
            content=st.none() | _texts(),
            tool_calls=st.lists(tool_calls(), max_size=2, unique_by=lambda call: call.id).map(tuple),
            reasoning=st.none() | _texts(),
        )
    return st.builds(ChatMessage, role=st.just(role), content=_texts())


@st.composite
def conversations(draw: st.DrawFn, *, max_turns: int = 3) -> tuple[ChatMessage, ...]:
    """Return conversations of a client: perhaps a system message, then turns; every tool call has its result."""
    messages = list(draw(st.lists(chat_messages("system"), max_size=1)))
    messages.append(draw(chat_messages("user")))
    for _ in range(draw(st.integers(0, max_turns))):
        answer = draw(chat_messages("assistant"))
        messages.append(answer)
        messages += [
            ChatMessage(role="tool", content=draw(_texts()), tool_call_id=call.id) for call in answer.tool_calls
        ] or [draw(chat_messages("user"))]
    return tuple(messages)


def _rewrite_arguments(message: ChatMessage, write: Callable[[object], str]) -> ChatMessage:
    def rewrite(call: ToolCall) -> ToolCall:
        try:
            return evolve(call, arguments=write(json.loads(call.arguments, parse_constant=_refuse)))
        except (ValueError, RecursionError):
            # Clients cannot parse it either, and pass it on as text.
            return call

    return evolve(message, tool_calls=tuple(map(rewrite, message.tool_calls)))


def _refuse(literal: str) -> object:
    raise ValueError(literal)


def _swap_empty(message: ChatMessage) -> ChatMessage:
    return evolve(message, content=(None if message.content == "" else message.content or ""))


def _lose_text(message: ChatMessage) -> ChatMessage:
    return evolve(message, content=None) if message.tool_calls else message


def _with_integers(value: object) -> object:
    """Convert ``value`` as a language with only one type of number does."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return {key: _with_integers(item) for key, item in value.items()} if isinstance(value, dict) else value


ECHO_STYLES: Mapping[str, Callable[[ChatMessage], ChatMessage]] = {
    "exact": lambda m: m,
    "null for empty": _swap_empty,
    "text stripped": lambda m: evolve(m, content=(m.content or "").strip()),
    "text padded": lambda m: evolve(m, content="\n" + (m.content or "")),
    "text of a tool turn lost": _lose_text,
    "reasoning dropped": lambda m: evolve(m, reasoning=None),
    "reasoning padded": lambda m: evolve(m, reasoning="\n" + (m.reasoning or "")),
    "arguments spaced": lambda m: _rewrite_arguments(m, lambda v: json.dumps(v, ensure_ascii=False)),
    "arguments compact": lambda m: _rewrite_arguments(m, lambda v: json.dumps(v, separators=(",", ":"))),
    "arguments sorted": lambda m: _rewrite_arguments(m, lambda v: json.dumps(v, sort_keys=True, indent=1)),
    "arguments with integers": lambda m: _rewrite_arguments(m, lambda v: json.dumps(_with_integers(v))),
    "name added": lambda m: evolve(m, name="agent"),
}
"""How clients echo an answer in their next request, by name: all keep its meaning, hardly any keep it exactly."""


def echo_styles() -> st.SearchStrategy[Callable[[ChatMessage], ChatMessage]]:
    """Return one of ``ECHO_STYLES``, or two of them in sequence."""
    names = st.lists(st.sampled_from(sorted(ECHO_STYLES)), min_size=1, max_size=2)
    return names.map(_chained)


def _chained(names: Sequence[str]) -> Callable[[ChatMessage], ChatMessage]:
    def echo(message: ChatMessage) -> ChatMessage:
        for name in names:
            message = ECHO_STYLES[name](message)
        return message

    return echo


# -------------------------------------------------------------------------------------------- sessions, rewards


def sampling_distributions() -> st.SearchStrategy[SamplingDistribution]:
    """Distributions that a request may ask for: often the plain softmax, sometimes greedy, truncated or adjusted."""
    return st.builds(
        SamplingDistribution,
        temperature=st.sampled_from([1.0, 1.0, 0.0, 0.3, 0.7, 1.3]),
        top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
        top_k=st.sampled_from([0, 0, 1, 5]),
        min_p=st.sampled_from([0.0, 0.0, 0.05]),
        is_adjusted=st.sampled_from([False, False, False, True]),
        logprobs_follow_truncation=st.booleans(),
    )


def completions(*, max_tokens: int = 5) -> st.SearchStrategy[Completion]:
    """Sampled tokens with log-probabilities and (perhaps mixed) versions."""
    token = st.tuples(st.integers(0, _MAX_TOKEN), st.floats(-50, 0, width=32), st.integers(0, 9))
    return st.builds(_completion, st.lists(token, max_size=max_tokens), st.sampled_from(FinishReason))


def _completion(tokens: Sequence[tuple[int, float, int]], finish: FinishReason) -> Completion:
    logprobs = [logprob for _, logprob, _ in tokens]
    return Completion(
        token_ids=[token_id for token_id, _, _ in tokens],
        logprobs=logprobs,
        raw_logprobs=logprobs,
        versions=sorted(version for _, _, version in tokens),
        finish=finish,
    )


def _rewards() -> st.SearchStrategy[float]:
    return st.floats(-1e6, 1e6, allow_subnormal=False)


@st.composite
def session_records(draw: st.DrawFn, *, max_size: int = 6) -> SessionRecord:
    """Sessions with several roots, siblings, forks of tokens, unfinished and unstored turns, rewards and outcomes."""
    turns: list[Interaction] = []
    for order in range(draw(st.integers(0, max_size))):
        turns.append(draw(_interactions(order, turns)))
    return SessionRecord(id=SessionId("session"), interactions=tuple(turns), is_ended=True)


@st.composite
def _interactions(draw: st.DrawFn, order: int, earlier: Sequence[Interaction]) -> Interaction:
    by_id = {turn.id: turn for turn in earlier}
    completed = [turn for turn in earlier if turn.status is InteractionStatus.COMPLETED]
    parent = draw(st.sampled_from([None, *completed[-3:]]))
    ancestors, turn = [], parent
    while turn is not None:
        ancestors.append(turn)
        turn = None if turn.parent is None else by_id[turn.parent]
    token_parent = draw(st.sampled_from([None, *ancestors])) if draw(st.booleans()) else parent
    num_before = 0
    if token_parent is not None:
        sampled = token_parent.completion
        num_before = token_parent.num_prompt_tokens + (0 if sampled is None else len(sampled.token_ids))
    suffix = draw(st.lists(st.integers(0, _MAX_TOKEN), min_size=1, max_size=4))
    # Mostly completed ones: only those have rewards, and turns that continue them.
    status = draw(st.sampled_from([InteractionStatus.COMPLETED] * 6 + list(InteractionStatus)))
    is_completed = status is InteractionStatus.COMPLETED
    has_tokens = is_completed or status is InteractionStatus.CANCELLED
    return Interaction(
        id=InteractionId(f"turn-{order}"),
        order=order,
        parent=None if parent is None else parent.id,
        token_parent=None if token_parent is None else token_parent.id,
        fork=None if token_parent is parent else ForkReason.TEMPLATE_REWROTE_HISTORY,
        messages=(ChatMessage(role="user", content=f"question {order}"),),
        prompt_suffix=np.array(suffix, np.int32),
        num_prompt_tokens=num_before + len(suffix),
        completion=draw(completions()) if has_tokens else None,
        output=ChatMessage(role="assistant", content=f"answer {order}") if has_tokens else None,
        status=status,
        completed_order=len(completed) if is_completed else None,
        reward=draw(st.none() | _rewards()) if is_completed else None,
        reward_scope=draw(st.sampled_from([RewardScope.ANSWER, *RewardScope])),
        is_stored=draw(st.sampled_from([True, True, True, False])),
        tag=draw(st.sampled_from([None, "planner"])),
        sampling=draw(st.none() | sampling_distributions()),
    )


@st.composite
def reward_trees(draw: st.DrawFn, *, max_size: int = 30) -> RewardTree:
    """Forests of any shape, parents before children, each with its own reward (often 0)."""
    size = draw(st.integers(0, max_size))
    parents = [draw(st.none() | st.integers(0, position - 1)) if position else None for position in range(size)]
    return RewardTree(
        ids=tuple(InteractionId(f"turn-{position}") for position in range(size)),
        parents=tuple(parents),
        rewards=tuple(draw(st.lists(st.just(0.0) | _rewards(), min_size=size, max_size=size))),
    )
