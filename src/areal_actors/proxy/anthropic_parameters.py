"""The table of parameters of Anthropic's Messages API and their support; see ``parameters`` for its meaning."""

from __future__ import annotations

from collections.abc import Mapping

from areal_actors.proxy.parameters import Parameter, ParameterTable, Support

__all__ = ["MESSAGES_PARAMETERS"]

_UNEDITED = "the history is read as it is sent"

_ROWS: Mapping[Support, Mapping[str, str]] = {
    Support.HONOURED: {
        "messages": (
            "text, tool_use, tool_result and thinking blocks, and role system anywhere; images and documents "
            "are refused"
        ),
        "system": "a string or text blocks, joined by newlines; Claude Code's billing line is left out",
        "model": "any name; it is repeated in the answer, and the session's policy answers",
        "max_tokens": "512 without it; bounded by the context length",
        "temperature": "0 to 2, default 1; 0 takes the most probable token",
        "top_p": "above 0, up to 1, default 1",
        "top_k": "0 or -1: off",
        "stop_sequences": "up to 16 strings; the text ends before the first of them, which stop_sequence names",
        "tools": "custom tools; those of Anthropic's servers are refused; defer_loading is ignored",
        "tool_choice": "auto, none, any and tool; disable_parallel_tool_use: only the first call counts",
        "thinking": (
            "enabled and disabled set enable_thinking for templates that have it; adaptive leaves it to "
            "them; budget_tokens and display are ignored"
        ),
        "output_config": "format of type json_schema; effort is ignored",
        "output_format": "the older name of output_config.format",
        "stream": "server-sent events as tokens are sampled",
        "metadata": "strings, kept with the interaction; agent names the agent of a multi-agent episode",
        "min_p": "0 to 1, default 0: off",
        "frequency_penalty": "-2 to 2",
        "presence_penalty": "-2 to 2",
        "repetition_penalty": "above 0, default 1",
        "logit_bias": "token id to a bias of -100 to 100",
        "stop_token_ids": "beside the model's own",
        "seed": "equal requests with equal seeds and weights sample equal tokens",
        "store": "false: answered, and not trained",
        "chat_template_kwargs": "passed to the chat template",
        "session_id": "names the session, beside the key that owns it",
    },
    Support.INERT: {
        "cache_control": "prefixes are cached without it; here, and in every block",
        "context_management": _UNEDITED,
        "service_tier": "there is one",
        "speed": "there is one",
        "inference_geo": "the engine is where it is",
        "diagnostics": "nothing is diagnosed",
        "betas": "what they switch on is judged by its own fields",
        "billing_policy": "nothing is billed",
        "user_profile_id": "sessions identify who asks",
        "workspace_id": "sessions identify who asks",
        "fallbacks": "the session's policy answers",
        "fallback_credit_token": "the session's policy answers",
    },
    Support.REFUSED: {
        "container": "no code is run here",
        "mcp_servers": "no server is called from here; offer their tools in tools",
        "compaction": _UNEDITED,
        "thread": "send the whole conversation in messages",
    },
}

MESSAGES_PARAMETERS = ParameterTable(
    operation="messages",
    parameters=tuple(
        Parameter(name=name, support=support, note=note)
        for support, rows in _ROWS.items()
        for name, note in rows.items()
    ),
)
