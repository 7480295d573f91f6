"""JSON schemas of response bodies, by name: data for the OpenAPI document, which ``openapi`` assembles."""

from __future__ import annotations

from collections.abc import Mapping

from areal_actors.proxy.schemas import Schema, list_of, one_object

__all__ = ["ANSWERS"]

_TEXT: Schema = {"type": "string"}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_OBJECT: Schema = {"type": ["object", "null"]}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TOKENS: Schema = list_of({"type": "integer"})

_TOOL_CALL = one_object(
    {
        "id": {"type": "string", "minLength": 1},
        "type": {"const": "function"},
        "function": one_object({"name": _TEXT, "arguments": _TEXT}, additionalProperties=False),
    },
    additionalProperties=False,
)
_MESSAGE = one_object(
    {
        "role": {"const": "assistant"},
        "content": _MAYBE_TEXT,
        "refusal": {"type": "null"},
        "reasoning_content": _TEXT,
        "tool_calls": list_of(_TOOL_CALL, minItems=1),
    },
    "reasoning_content",
    "tool_calls",
    additionalProperties=False,
)
_TOKEN: Mapping[str, Schema] = {"token": _TEXT, "logprob": {"type": "number"}, "bytes": {"type": ["array", "null"]}}
_LOGPROBS = {
    "anyOf": [
        {"type": "null"},
        one_object(
            {
                "content": list_of(one_object({**_TOKEN, "top_logprobs": list_of(one_object(_TOKEN))})),
                "refusal": {"type": "null"},
            }
        ),
    ]
}
_FINISH = {"enum": ["stop", "length", "tool_calls"]}
_USAGE = one_object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": one_object({"cached_tokens": _COUNT}),
    }
)
_CHOICE: Mapping[str, Schema] = {"index": _COUNT, "interaction_id": _TEXT, "logprobs": _LOGPROBS}
_DELTA: Mapping[str, Schema] = {
    "role": {"const": "assistant"},
    "content": _MAYBE_TEXT,
    "reasoning_content": _TEXT,
    "tool_calls": list_of(one_object({"index": _COUNT, "id": _TEXT, "type": _TEXT, "function": _OBJECT}, "id", "type")),
}
_ENVELOPE: Mapping[str, Schema] = {
    "id": {"type": "string", "minLength": 1},
    "created": {"type": "integer"},
    "model": _TEXT,
}
_TRAJECTORY = one_object(
    {
        "interaction_ids": list_of(_TEXT),
        "reward": {"type": ["number", "null"]},
        "tag": _MAYBE_TEXT,
        "input_ids": _TOKENS,
        "loss_mask": _TOKENS,
        "logprobs": list_of({"type": "number"}),
        "versions": _TOKENS,
        "returns": list_of({"type": "number"}),
        "turns": _TOKENS,
        "predecessors": _TOKENS,
        "raw_logprobs": list_of({"type": ["number", "null"]}),
    },
    "predecessors",
    "raw_logprobs",
)

_BLOCK = {
    "anyOf": [
        one_object({"type": {"const": "text"}, "text": _TEXT, "citations": {"type": "null"}}),
        one_object({"type": {"const": "thinking"}, "thinking": _TEXT, "signature": _TEXT}),
        one_object({"type": {"const": "tool_use"}, "id": _TEXT, "name": _TEXT, "input": {"type": "object"}}),
    ]
}
_ANTHROPIC_USAGE = one_object(
    {
        "input_tokens": _COUNT,
        "cache_creation_input_tokens": _COUNT,
        "cache_read_input_tokens": _COUNT,
        "output_tokens": _COUNT,
    }
)

_ITEM = {
    "anyOf": [
        one_object(
            {
                "id": _TEXT,
                "type": {"const": "message"},
                "role": {"const": "assistant"},
                "status": _TEXT,
                "content": list_of(
                    one_object({"type": {"const": "output_text"}, "text": _TEXT, "annotations": list_of({})})
                ),
            }
        ),
        one_object(
            {
                "id": _TEXT,
                "type": {"const": "function_call"},
                "status": _TEXT,
                "call_id": _TEXT,
                "name": _TEXT,
                "arguments": _TEXT,
            }
        ),
        one_object({"id": _TEXT, "type": {"const": "reasoning"}, "summary": list_of({}), "content": list_of({})}),
    ]
}
_RESPONSES_USAGE = one_object(
    {
        "input_tokens": _COUNT,
        "input_tokens_details": one_object({"cached_tokens": _COUNT}),
        "output_tokens": _COUNT,
        "output_tokens_details": one_object({"reasoning_tokens": _COUNT}),
        "total_tokens": _COUNT,
    }
)

_MAYBE_COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
_KEY: dict[str, Schema] = {
    "id": _TEXT,
    "object": {"const": "key"},
    "user": _TEXT,
    "experiment": _MAYBE_TEXT,
    "trial": _MAYBE_TEXT,
    "max_sessions": _MAYBE_COUNT,
    "max_requests_per_minute": _MAYBE_COUNT,
    "max_tokens_per_day": _MAYBE_COUNT,
    "tokens_today": _COUNT,
    "created_at": _COUNT,
    "expires_at": _MAYBE_COUNT,
    "revoked_at": _MAYBE_COUNT,
}

ANSWERS: Mapping[str, Schema] = {
    "TextCompletion": one_object(
        {
            **_ENVELOPE,
            "object": {"const": "text_completion"},
            "choices": list_of(
                one_object({**_CHOICE, "text": _TEXT, "logprobs": _OBJECT, "finish_reason": _FINISH}, "interaction_id"),
                minItems=1,
            ),
            "usage": _USAGE,
        },
        additionalProperties=False,
    ),
    "Response": one_object(
        {
            "id": {"type": "string", "minLength": 1},
            "object": {"const": "response"},
            "created_at": _COUNT,
            "completed_at": {"type": ["integer", "null"]},
            "status": {"enum": ["completed", "incomplete"]},
            "error": {"type": "null"},
            "incomplete_details": _OBJECT,
            "model": _TEXT,
            "output": list_of(_ITEM, minItems=1),
            "usage": _RESPONSES_USAGE,
            "tools": list_of({"type": "object"}),
            "tool_choice": {"type": ["string", "object"]},
            "parallel_tool_calls": {"type": "boolean"},
        }
    ),
    "Message": one_object(
        {
            "id": {"type": "string", "minLength": 1},
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": _TEXT,
            "content": list_of(_BLOCK, minItems=1),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": _MAYBE_TEXT,
            "usage": _ANTHROPIC_USAGE,
        }
    ),
    "TokenCount": one_object({"input_tokens": _COUNT}),
    "AnthropicError": one_object(
        {
            "type": {"const": "error"},
            "error": one_object({"type": _TEXT, "message": _TEXT, "code": _MAYBE_TEXT, "param": _MAYBE_TEXT}),
            "request_id": _MAYBE_TEXT,
        }
    ),
    "ChatCompletion": one_object(
        {
            **_ENVELOPE,
            "object": {"const": "chat.completion"},
            "choices": list_of(
                one_object({**_CHOICE, "message": _MESSAGE, "finish_reason": _FINISH}, "interaction_id"), minItems=1
            ),
            "usage": _USAGE,
        },
        additionalProperties=False,
    ),
    "ChatCompletionChunk": one_object(
        {
            **_ENVELOPE,
            "object": {"const": "chat.completion.chunk"},
            "choices": list_of(
                one_object(
                    {
                        **_CHOICE,
                        "delta": one_object(_DELTA, *_DELTA, additionalProperties=False),
                        "finish_reason": {"anyOf": [{"type": "null"}, _FINISH]},
                    },
                    "interaction_id",
                    "logprobs",
                )
            ),
            "usage": _USAGE,
        },
        "usage",
        additionalProperties=False,
    ),
    "Error": one_object(
        {"error": one_object({"message": _TEXT, "type": _TEXT, "param": _MAYBE_TEXT, "code": _MAYBE_TEXT})},
        additionalProperties=False,
    ),
    "SessionStarted": one_object(
        {"session_id": _TEXT, "api_key": _TEXT, "completion_key": _TEXT}, additionalProperties=False
    ),
    "Rewarded": one_object({"status": {"const": "success"}, "interaction_id": _TEXT}, additionalProperties=False),
    "Logged": one_object({"status": {"const": "success"}}, additionalProperties=False),
    "SessionEnded": one_object(
        {"status": {"const": "success"}, "message": _TEXT, "interaction_count": _COUNT}, additionalProperties=False
    ),
    "Capacity": one_object({"capacity": {"type": "integer"}, "reserved": _COUNT}, additionalProperties=False),
    "Trajectories": one_object(
        {
            "version": {"enum": [1, 2]},
            "session_id": _TEXT,
            "member": _COUNT,
            "reward": {"type": ["number", "null"]},
            "num_turns": _COUNT,
            "seconds": {"type": "number"},
            "failure": _MAYBE_TEXT,
            "trajectories": list_of(_TRAJECTORY),
            "untrained": list_of(one_object({"interaction_id": _TEXT, "num_tokens": _COUNT, "reason": _TEXT})),
        },
        additionalProperties=False,
    ),
    "Key": one_object(_KEY, additionalProperties=False),
    "IssuedKey": one_object({**_KEY, "key": _TEXT}, additionalProperties=False),
    "Keys": one_object(
        {"object": {"const": "list"}, "data": list_of({"$ref": "#/components/schemas/Key"})},
        additionalProperties=False,
    ),
    "Models": one_object(
        {
            "object": {"const": "list"},
            "data": list_of(
                one_object({"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT})
            ),
        }
    ),
    "Health": one_object({"status": {"enum": ["ok", "stopping", "unavailable"]}, "requests": _COUNT}),
}
"""Schemas of response bodies, by name."""
