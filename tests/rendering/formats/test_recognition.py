"""Families are told apart by their templates."""

from __future__ import annotations

import pytest
from tests.rendering import templates

from areal_actors.rendering.parsers import REASONING_FORMATS, TOOL_FORMATS

NAMED = {name: getattr(templates, name) for name in templates.__all__ if isinstance(getattr(templates, name), str)}

HERMES = """{{- 'return {"name": <function-name>, "arguments": <args-json-object>} within <tool_call></tool_call>' }}
{%- for tool in tools %}{{ '{"type": "function", "function": {"name": "' + tool.name }}{% endfor %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\\n</tool_call>' }}"""

QWEN_CODER = """{{- '<tools>' }}{{- '<tool_call>\\n<function=example>\\n<parameter=one>\\nvalue\\n</parameter>' }}
{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}{{- '<parameter=' + name + '>\\n' }}"""

LLAMA_31 = """{%- set builtin_tools = none %}{{- 'Respond in the format {"name": function name, "parameters": ' }}
{{- 'dictionary of argument name and its value}. Do not use variables.' }}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{{- "<|python_tag|>" + call.name + ".call(" }}
{{- '{"name": "' + call.name + '", ' }}
{{- '"parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}"""

LLAMA_4 = """{{- '<|python_start|>' }}{{- message.content }}{{- '<|python_end|>' }}
{{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}"""

LLAMA_PYTHONIC = """{{- 'Respond with a list: [func_name1(params_name1=params_value1, ...), func_name2(params)] ' }}
{{- '<|python_start|>[' }}{{- call.name + '(' }}"""

LFM_2 = """{{- '<|tool_list_start|>[' }}{%- for tool in tools %}{{ tool | tojson }}{% endfor %}"""

GLM_45 = (
    """{{- '<tool_call>{function-name}\\n<arg_key>{key}</arg_key>\\n<arg_value>{value}</arg_value>\\n</tool_call>' }}"""
)

GRANITE = """{{- '<|tool_call|>[{"name": "' + name + '", "arguments": ' }}"""

COMMAND_R = """{{- '{"tool_name": "' + name + '", "parameters": ' }}"""

SIGNATURES = """{{- '{"name": "' + tool.name + '", "description": "' + tool.description + '", "parameters": ' }}"""

TEMPLATES = {
    **NAMED,
    "HERMES": HERMES,
    "QWEN_CODER": QWEN_CODER,
    "LLAMA_31": LLAMA_31,
    "LLAMA_4": LLAMA_4,
    "GLM_45": GLM_45,
    "LLAMA_PYTHONIC": LLAMA_PYTHONIC,
    "LFM_2": LFM_2,
    "GRANITE": GRANITE,
    "COMMAND_R": COMMAND_R,
    "SIGNATURES": SIGNATURES,
}


def speakers(formats, source):
    """Names of the formats that take a template for theirs."""
    return [name for name, form in formats.items() if form.matches_template(source)]


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_no_two_families_claim_one_template(source):
    """Whatever the order of the tables, the same format is recognised."""
    assert len(speakers(TOOL_FORMATS, source)) <= 1
    assert len(speakers(REASONING_FORMATS, source)) <= 1


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (HERMES, ["hermes"]),
        (templates.QWEN, ["hermes"]),
        (QWEN_CODER, ["qwen-coder"]),
        (LLAMA_31, ["llama-json"]),
        (LLAMA_4, ["llama-json"]),
        (templates.LLAMA, ["llama-json"]),
        (LLAMA_PYTHONIC, ["pythonic"]),
        (LFM_2, ["pythonic"]),
        (GLM_45, ["glm"]),
        (GRANITE, ["granite"]),
        (COMMAND_R, []),
        (SIGNATURES, []),
        (templates.SMOLLM, []),
    ],
)
def test_families_are_recognised(source, names):
    """By what their templates write; a family that we do not know is not mistaken for one that we do."""
    assert names == speakers(TOOL_FORMATS, source)
