"""JSON schemas of request bodies: data for the OpenAPI document, which ``openapi`` assembles.

A request's ``ParameterTable`` lists its parameters and their support; this module has the values that they take, once
for all dialects. A dialect whose parameter differs supplies its own schema. Response bodies are in ``answer_schemas``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_actors.domain import MAX_NUMBERS
from areal_actors.proxy.parameters import Parameter, ParameterTable, Support

__all__ = [
    "ARGUMENTS",
    "CHAT_MESSAGES",
    "MAX_GROUP",
    "MAX_POSITION",
    "MAX_SEED",
    "VALUES",
    "Schema",
    "describe_request",
    "list_of",
    "one_object",
]

Schema = Mapping[str, Any]

MAX_GROUP = 4096
"""Maximum number of sessions in a group."""
MAX_POSITION = 2**31 - 1
MAX_SEED = 2**63 - 1

_MAX_INT = 2**31 - 1
_ASKS_FOR_NOTHING = ({"type": "null"}, {"type": "array", "maxItems": 0}, {"type": "object", "maxProperties": 0})


def _number(low: float, high: float, *, is_open: bool = False) -> Schema:
    edge = {"exclusiveMinimum": low} if is_open else {"minimum": low}
    return {"type": ["number", "null"], **edge, "maximum": high}


def _integer(low: int, high: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def list_of(items: Schema, **more: Any) -> Schema:
    """Return the schema of an array."""
    return {"type": "array", "items": items, **more}


def one_object(properties: Mapping[str, Schema], *optional: str, **more: Any) -> Schema:
    """Return the schema of an object with all of ``properties``, of which ``optional`` ones may be missing."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, **more}


_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_NAME: Schema = {"type": ["string", "null"], "minLength": 1}
_FLAG: Schema = {"type": ["boolean", "null"]}
_OBJECT: Schema = {"type": ["object", "null"]}

VALUES: Mapping[str, Schema] = {
    "messages": list_of({"type": "object"}, minItems=1),
    "model": _NAME,
    "max_tokens": _integer(1, _MAX_INT),
    "max_completion_tokens": _integer(1, _MAX_INT),
    "max_output_tokens": _integer(1, _MAX_INT),
    "n": _integer(1, 128),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, is_open=True),
    "top_k": _integer(-1, _MAX_INT),
    "min_p": _number(0, 1),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 10, is_open=True),
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": _number(-100, 100),
    },
    "stop": {"type": ["string", "array", "null"], "items": {"type": "string", "minLength": 1}, "maxItems": 16},
    "stop_sequences": {"type": ["array", "null"], "items": {"type": "string", "minLength": 1}, "maxItems": 16},
    "stop_token_ids": {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0, "maximum": _MAX_INT}},
    "seed": _integer(-(2**63), 2**63 - 1),
    "logprobs": _FLAG,
    "top_logprobs": _integer(0, 20),
    "tools": {"type": ["array", "null"], "items": {"type": "object"}},
    "tool_choice": {"type": ["string", "object", "null"]},
    "parallel_tool_calls": _FLAG,
    "response_format": _OBJECT,
    "guided_json": {"type": ["object", "string", "null"]},
    "guided_regex": _MAYBE_TEXT,
    "guided_choice": {"type": ["array", "null"], "items": {"type": "string", "minLength": 1}},
    "structured_outputs": _OBJECT,
    "json_schema": {"type": ["object", "string", "null"]},
    "regex": _MAYBE_TEXT,
    "text": _OBJECT,
    "reasoning": _OBJECT,
    "include": {"type": ["array", "null"], "items": {"type": "string"}},
    "input": {"type": ["string", "array"], "minLength": 1, "minItems": 1},
    "instructions": _MAYBE_TEXT,
    "previous_response_id": _NAME,
    "stream": _FLAG,
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _FLAG}},
    "store": _FLAG,
    "metadata": {"type": ["object", "null"], "additionalProperties": {"type": "string"}},
    "chat_template_kwargs": _OBJECT,
    "session_id": _MAYBE_TEXT,
    "system": {"type": ["string", "array", "null"], "items": {"type": "object"}},
    "thinking": _OBJECT,
    "output_config": _OBJECT,
    "output_format": _OBJECT,
    "prompt": {"anyOf": [{"type": "string", "minLength": 1}, list_of({"type": "integer", "minimum": 0}, minItems=1)]},
}
"""Values that an honoured parameter of this name takes.

``null`` has no effect. A name that is not listed takes any value.
"""

CHAT_MESSAGES: Schema = list_of(
    one_object(
        {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"type": ["string", "array", "null"]},
            "name": _MAYBE_TEXT,
            "tool_call_id": _MAYBE_TEXT,
            "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
            "reasoning_content": _MAYBE_TEXT,
        },
        "content",
        "name",
        "tool_call_id",
        "tool_calls",
        "reasoning_content",
    ),
    minItems=1,
)


def describe_request(
    table: ParameterTable, *, required: tuple[str, ...] = (), own: Mapping[str, Schema] | None = None
) -> Schema:
    """Return the schema of a request body. ``own`` are the dialect's schemas where they differ from ``VALUES``.

    It describes each parameter separately. Invalid combinations (``top_logprobs`` without ``logprobs``) and values that
    depend on the model are not described; they are answered with 400.
    """
    values = {**VALUES, **(own or {})}
    return {
        "type": "object",
        "properties": {parameter.name: _describe(parameter, values) for parameter in table.parameters},
        "required": list(required),
        "additionalProperties": {"anyOf": list(_ASKS_FOR_NOTHING)},
    }


def _describe(parameter: Parameter, values: Mapping[str, Schema]) -> Schema:
    if parameter.support is Support.HONOURED:
        return {**values.get(parameter.name, {}), "description": parameter.note}
    if parameter.support is Support.INERT:
        return {"description": f"Accepted and ignored: {parameter.note}."}
    neutral = [{"const": value} for value in parameter.neutral]
    return {"description": f"Refused: {parameter.note}.", "anyOf": [*neutral, *_ASKS_FOR_NOTHING]}


ARGUMENTS: Mapping[str, Mapping[str, Schema]] = {
    "rl/start_session": {
        "task_id": _NAME,
        "api_key": {**_NAME, "minLength": 8},
        "group_id": _NAME,
        "group_size": _integer(1, MAX_GROUP),
        "position": _integer(0, MAX_POSITION),
        "member": _integer(0, MAX_GROUP - 1),
        "seed": _integer(-MAX_SEED - 1, MAX_SEED),
    },
    "rl/set_reward": {
        "reward": {"type": ["number", "string", "boolean"]},
        "interaction_id": _NAME,
        "completion_id": _NAME,
        "session_id": _NAME,
    },
    "rl/log_metrics": {
        "metrics": {
            "type": "object",
            "propertyNames": {"pattern": "^[A-Za-z0-9_.-]{1,64}$"},
            "additionalProperties": {"type": ["number", "boolean"]},
            "minProperties": 1,
            "maxProperties": MAX_NUMBERS,
        },
        "session_id": _NAME,
    },
    "rl/end_session": {"final_reward": {"type": ["number", "string", "boolean", "null"]}, "session_id": _NAME},
    "rl/finalize": {"final_reward": {"type": ["number", "string", "boolean"]}, "session_id": _NAME},
    "keys": {
        "user": {"type": "string", "minLength": 1, "maxLength": 200},
        "experiment": _NAME,
        "trial": _NAME,
        "max_sessions": _integer(0, 2**53),
        "max_requests_per_minute": _integer(0, 2**53),
        "max_tokens_per_day": _integer(0, 2**53),
        "expires_at": {"type": ["string", "number", "null"]},
    },
    "export_trajectories": {"session_id": _NAME, "discount": _number(0, 1), "style": _NAME},
}
"""Arguments of the routes other than completions, in the body or in the query."""
