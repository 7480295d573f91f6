"""The table of parameters of OpenAI's plain completions and their support; see ``parameters`` for its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_actors.proxy.parameters import Parameter, ParameterTable, Support

__all__ = ["RAW_PARAMETERS"]

_ONE_BY_ONE = "tokens are sampled one by one"
_NO_GRAMMAR = "the form of chat completions can be held, that of raw text not"

_ROWS: Mapping[Support, Mapping[str, str]] = {
    Support.HONOURED: {
        "prompt": "a string, or token ids; several prompts are refused: send a request for each",
        "model": "any name; it is repeated in the answer, and the session's policy answers",
        "max_tokens": "16 without it, as OpenAI has it; bounded by the context length",
        "n": "1 to 128 answers, remembered as siblings",
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
        "logprobs": (
            "0 to 5 alternatives for each token that was sampled, end token included; "
            "a stream has them in its last chunk"
        ),
        "stream": "server-sent events as tokens are sampled",
        "stream_options": "include_usage; include_obfuscation is ignored",
        "store": "false: answered, and not trained",
        "metadata": "kept with the interaction; agent names the agent of a multi-agent episode",
        "session_id": "names the session, beside the key that owns it",
    },
    Support.INERT: {
        "user": "sessions identify who asks",
        "service_tier": "there is one",
        "priority": "requests are served in order of arrival",
        "cache_salt": "prefixes are cached without it",
        "request_id": "answers have ids of their own",
    },
    Support.REFUSED: {
        "echo": "the prompt is not repeated",
        "suffix": "text is continued, not filled in",
        "best_of": "use n, and choose",
        "use_beam_search": _ONE_BY_ONE,
        "length_penalty": "belongs to beam search",
        "ignore_eos": "the model decides when its text ends",
        "min_tokens": "the model decides when its text ends",
        "add_special_tokens": "texts begin as the tokenizer begins them; send ids for anything else",
        "skip_special_tokens": "what is special never reaches the text",
        "include_stop_str_in_output": "the text ends before the stop string",
        "truncate_prompt_tokens": "the prompt is read as it is sent",
        "prompt_logprobs": "only sampled tokens are captured",
        "return_token_ids": "export the session to read its tokens",
        "response_format": _NO_GRAMMAR,
        "structured_outputs": _NO_GRAMMAR,
        "guided_json": _NO_GRAMMAR,
        "guided_regex": _NO_GRAMMAR,
        "guided_choice": _NO_GRAMMAR,
        "guided_grammar": _NO_GRAMMAR,
    },
}

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "add_special_tokens": (True,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (0,),
    "return_token_ids": (False,),
}

RAW_PARAMETERS = ParameterTable(
    operation="completions",
    parameters=tuple(
        Parameter(name=name, support=support, note=note, neutral=_NEUTRAL.get(name, ()))
        for support, rows in _ROWS.items()
        for name, note in rows.items()
    ),
)
