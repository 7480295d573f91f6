"""Random conversations, and answers written as a model of the family would write them."""

from __future__ import annotations

import json
from functools import cache

from hypothesis import strategies as st
from tests.rendering import templates

from areal_actors.domain import ChatMessage, Ints, Tool, as_ints
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.rendering import Renderer, create_renderer

TOOL = Tool(
    name="multiply",
    description="Multiply two numbers.",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
)

plain_texts = st.text(min_size=1, max_size=12).map(str.strip).filter(bool)
hostile_texts = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "[INST]", "<|eot|>", "<", "|im_end|>", "\n", "\ud800", "é", "x"]),
    min_size=1,
    max_size=6,
).map(lambda parts: "".join(parts).strip() or "x")
texts = plain_texts | hostile_texts
arguments = st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 99) | plain_texts, max_size=2)


@cache
def renderer_of(name: str) -> Renderer:
    """The renderer of one of the templates, made once."""
    tokenizer = create_tiny_tokenizer(template=getattr(templates, name), more_special=templates.MORE_SPECIAL)
    if name == "GLM":
        tokenizer.eos_token = "<|user|>"
    return create_renderer(tokenizer)


def say(role: str, content: str | None = None, **more: object) -> ChatMessage:
    """A message, briefly."""
    return ChatMessage(role=role, content=content, **more)


def write_call(values: dict[str, object]) -> str:
    """A call of ``TOOL`` in the Hermes format."""
    body = json.dumps({"name": TOOL.name, "arguments": values}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def sample(renderer: Renderer, text: str, *, is_closed: bool = True) -> Ints:
    """The ids that the tokenizer has for ``text``, as if a model had sampled them."""
    vocabulary = renderer.vocabulary
    ids = vocabulary.encode(vocabulary.guard(text))
    return as_ints([*ids, renderer.stop_token_ids[0]] if is_closed else ids)


@st.composite
def answers(draw: st.DrawFn, *, has_tools: bool, can_think: bool = False) -> str:
    """What a model may say: text, calls, both, with or without thinking."""
    num_calls = draw(st.integers(0, 2)) if has_tools else 0
    parts = [draw(texts)] if num_calls == 0 or draw(st.booleans()) else []
    parts += [write_call(draw(arguments)) for _ in range(num_calls)]
    thought = f"<think>\n{draw(plain_texts)}\n</think>\n\n" if can_think and draw(st.booleans()) else ""
    return thought + "\n".join(parts)


@st.composite
def follow_ups(draw: st.DrawFn, answer: ChatMessage) -> tuple[ChatMessage, ...]:
    """What an agent sends next: the results of the calls, or a question."""
    if not answer.tool_calls:
        return (say("user", draw(texts)),)
    return tuple(say("tool", draw(texts), tool_call_id=call.id, name=call.name) for call in answer.tool_calls)
