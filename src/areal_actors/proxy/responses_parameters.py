"""The table of parameters of OpenAI's Responses API and their support; see ``parameters`` for its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_actors.proxy.parameters import Parameter, ParameterTable, Support

__all__ = ["RESPONSES_PARAMETERS"]

_ROWS: Mapping[Support, Mapping[str, str]] = {
    Support.HONOURED: {
        "input": (
            "a text, or items: messages, reasoning, function_call and function_call_output; images, files "
            "and item_reference are refused"
        ),
        "instructions": "a system message before all others, for this request alone",
        "previous_response_id": "follows an answer of the same session: its history, without its instructions",
        "model": "any name; it is repeated in the answer, and the session's policy answers",
        "max_output_tokens": "512 without it; bounded by the context length; thinking counts",
        "temperature": "0 to 2, default 1; 0 takes the most probable token",
        "top_p": "above 0, up to 1, default 1",
        "top_k": "0 or -1: off",
        "min_p": "0 to 1, default 0: off",
        "frequency_penalty": "-2 to 2",
        "presence_penalty": "-2 to 2",
        "repetition_penalty": "above 0, default 1",
        "logit_bias": "token id to a bias of -100 to 100",
        "stop": "up to 16 strings; the text ends before the first of them",
        "stop_token_ids": "beside the model's own",
        "seed": "equal requests with equal seeds and weights sample equal tokens",
        "include": (
            "message.output_text.logprobs: those of all sampled tokens, at the end of the text; whatever "
            "else is ignored"
        ),
        "top_logprobs": "0 to 20; asks for logprobs, too",
        "tools": "functions; tools of OpenAI's servers are refused",
        "tool_choice": "auto, none, required, a function, or allowed_tools",
        "parallel_tool_calls": "false: only the first call of an answer counts",
        "text": "format text, json_object or json_schema; verbosity is refused, unless it is medium",
        "reasoning": "effort is refused; summary and context are ignored: reasoning is shown as it is",
        "stream": "server-sent events as tokens are sampled",
        "store": "false is a habit of clients, and ignored unless proxy.honour_store.responses is true",
        "metadata": "repeated in the answer; agent names the agent of a multi-agent episode",
        "chat_template_kwargs": "passed to the chat template",
        "session_id": "names the session, beside the key that owns it",
    },
    Support.INERT: {
        "stream_options": "nothing needs obfuscation here",
        "truncation": "nothing is ever dropped: a conversation that is too long is refused",
        "max_tool_calls": "counts calls of OpenAI's own tools",
        "user": "sessions identify who asks",
        "safety_identifier": "sessions identify who asks",
        "service_tier": "there is one",
        "priority": "requests are served in order of arrival",
        "prompt_cache_key": "prefixes are cached without it",
        "prompt_cache_options": "prefixes are cached without it",
        "prompt_cache_retention": "prefixes are cached without it",
        "cache_salt": "prefixes are cached without it",
        "request_id": "answers have ids of their own",
        "access_programs": "every client of a session has access",
        "image": "there are no images to compress",
    },
    Support.REFUSED: {
        "background": "an answer is waited for; hanging up cancels it",
        "conversation": "a session remembers its conversations; send previous_response_id",
        "context_management": "nothing is compacted; send what the model shall read",
        "prompt": "there are no stored prompts; send instructions and input",
        "moderation": "nothing is moderated here",
        "n": "an answer is one; ask again",
        "max_tokens": "use max_output_tokens",
        "messages": "use input",
        "logprobs": "use include",
        "response_format": "use text.format",
        "reasoning_effort": "use reasoning",
    },
}

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"background": (False,), "n": (1,)}

RESPONSES_PARAMETERS = ParameterTable(
    operation="responses",
    parameters=tuple(
        Parameter(name=name, support=support, note=note, neutral=_NEUTRAL.get(name, ()))
        for support, rows in _ROWS.items()
        for name, note in rows.items()
    ),
)
