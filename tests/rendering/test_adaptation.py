"""What a template lacks is said in text; what it has is left to it."""

from __future__ import annotations

import pytest
from tests.rendering.conversations import TOOL, renderer_of, say

from areal_actors.domain import ToolCall
from areal_actors.rendering.formats.json_families import HERMES

BLOCK = HERMES.format_tools([TOOL])
CALL = ToolCall(id="call00000", name="multiply", arguments='{"a":  1}')
DEFAULT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def text_of(name, *messages, tools=()):
    """The rendered conversation."""
    renderer = renderer_of(name)
    return renderer.decode(renderer.render(messages, tools=tools))


def test_block_follows_the_default_system_prompt():
    """The prompt that the template would have given stays, and the tools come behind it."""
    text = text_of("SMOLLM", say("user", "x"), tools=[TOOL])

    assert text.startswith(f"<|im_start|>system\n{DEFAULT}\n\n{BLOCK}<|im_end|>\n<|im_start|>user\nx<|im_end|>")
    assert text_of("SMOLLM", say("user", "x")).startswith(f"<|im_start|>system\n{DEFAULT}<|im_end|>\n")


def test_block_follows_the_given_system_prompt():
    """Also where it is empty, and where it is a developer's."""
    question = say("user", "x")

    assert f"system\nhi\n\n{BLOCK}<|im_end|>" in text_of("SMOLLM", say("system", "hi"), question, tools=[TOOL])
    assert f"system\n{BLOCK}<|im_end|>" in text_of("CHATML", say("system", ""), question, tools=[TOOL])
    assert f"system\nhi\n\n{BLOCK}" in text_of("CHATML", say("developer", "hi"), question, tools=[TOOL])
    assert f"system\n{BLOCK}<|im_end|>" in text_of("CHATML", question, tools=[TOOL])


def test_without_a_system_role_the_block_precedes_the_first_question():
    """Gemma's templates have no system prompt."""
    assert f"<start_of_turn>user\n{BLOCK}\n\nx<end_of_turn>" in text_of("GEMMA", say("user", "x"), tools=[TOOL])


def test_calls_and_results_are_written_out():
    """In the family's tags; the arguments are the model's own text."""
    act, result = say("assistant", "Hm.", tool_calls=(CALL,)), say("tool", "12", tool_call_id=CALL.id)
    text = text_of("SMOLLM", say("user", "x"), act, result)

    assert 'assistant\nHm.\n<tool_call>\n{"name": "multiply", "arguments": {"a":  1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>tool\n<tool_response>\n12\n</tool_response><|im_end|>" in text


def test_results_are_user_messages_without_a_tool_role():
    """Neighbours are joined, because roles must alternate."""
    act = say("assistant", tool_calls=(CALL, CALL))
    text = text_of("GEMMA", say("user", "x"), act, say("tool", "1"), say("tool", "2"))

    assert "user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><end_of_turn>" in text


@pytest.mark.parametrize("name", ["QWEN", "LLAMA", "MISTRAL"])
def test_supported_features_are_left_to_the_template(name):
    """Its own words for tools and calls are used, and ours do not appear."""
    act = say("assistant", tool_calls=(CALL,))
    text = text_of(name, say("user", "x"), act, say("tool", "12", tool_call_id=CALL.id), tools=[TOOL])

    assert renderer_of(name).formatter.adaptation.format is None
    assert "You may call these tools" not in text
    assert all(part in text for part in ("multiply", '"a": 1', "12"))
