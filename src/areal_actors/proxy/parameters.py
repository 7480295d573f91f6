"""Every parameter that a client may send and its support: honoured, inert, or refused with a reason.

There is one table per route, which decides for the code, for ``docs/http.md`` and for the tests, which compare the
parameter lists of the SDKs with it. The dialect's own module reads and checks honoured values.

A name that is not in the table is refused. An unknown name is either a misspelling (``temperatur``), whose effect would
silently be missing from the training data, or a feature whose effect is unknown. OpenAI's own endpoint refuses unknown
names as well, so no client relies on them being ignored. Users who know that a name does not matter list it in
``ProxyConfig.inert_parameters``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from attrs import field, frozen

from areal_actors.errors import UnsupportedParameter

__all__ = ["CHAT_PARAMETERS", "Parameter", "ParameterTable", "Support"]

_MAX_SHOWN = 64


class Support(StrEnum):
    """How a parameter is handled."""

    HONOURED = "honoured"
    INERT = "inert"
    """Accepted and ignored, because it cannot change the answer."""
    REFUSED = "refused"
    """Answered with 400, because it would change the answer and cannot be honoured."""


@frozen(kw_only=True)
class Parameter:
    """One row of the table.

    ``neutral`` values have no effect, so they are accepted even if the parameter is refused.
    """

    name: str
    support: Support
    note: str = ""
    neutral: tuple[Any, ...] = ()


@frozen(kw_only=True)
class ParameterTable:
    """The parameters of one route. ``operation`` names the route in error messages."""

    operation: str
    parameters: tuple[Parameter, ...]
    _by_name: Mapping[str, Parameter] = field(init=False, repr=False, eq=False)
    _honoured: frozenset[str] = field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        """Index the rows by name."""
        object.__setattr__(self, "_by_name", {parameter.name: parameter for parameter in self.parameters})
        honoured = frozenset(p.name for p in self.parameters if p.support is Support.HONOURED)
        object.__setattr__(self, "_honoured", honoured)

    def check(self, body: Mapping[str, Any], *, inert: Collection[str] = ()) -> None:
        """Raise an error if ``body`` has a parameter that cannot be honoured.

        ``null`` and empty lists and objects have no effect and are accepted under any name. ``inert`` are further names
        to accept and ignore.

        Raises:
            UnsupportedParameter: names the parameter and the reason.
        """
        # Most requests name only honoured parameters; one set comparison accepts them.
        if body.keys() <= self._honoured:
            return
        for name, value in body.items():
            if name in self._honoured or name in inert or value is None or value in ([], {}):
                continue
            parameter = self._by_name.get(name)
            if parameter is None:
                raise self._unknown(name)
            if parameter.support is Support.REFUSED and not _is_neutral(value, parameter.neutral):
                raise UnsupportedParameter(f"{name} is not supported: {parameter.note}.", param=name)

    def _unknown(self, name: str) -> UnsupportedParameter:
        shown = name[:_MAX_SHOWN]
        near = get_close_matches(shown, self._by_name, n=1)
        hint = f"did you mean {near[0]}?" if near else "leave it out."
        return UnsupportedParameter(
            f"{shown!r} is not a parameter of {self.operation}; {hint} "
            "If it does not matter, list it in the proxy's inert_parameters.",
            param=shown,
        )


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether ``value`` is one of ``neutral``, where ``True`` and 1 differ."""
    return any(value == known and isinstance(value, bool) is isinstance(known, bool) for known in neutral)


def _honoured(name: str, note: str = "") -> Parameter:
    return Parameter(name=name, support=Support.HONOURED, note=note)


def _inert(name: str, note: str) -> Parameter:
    return Parameter(name=name, support=Support.INERT, note=note)


def _refused(name: str, note: str, *neutral: Any) -> Parameter:
    return Parameter(name=name, support=Support.REFUSED, note=note, neutral=neutral)


_NO_EBNF = "use response_format, guided_json, guided_regex or guided_choice"
_REASONING = "models differ in how they think; pass chat_template_kwargs for a template that has a switch"

_CHAT = (
    _honoured("messages", "content parts of type text are joined by newlines; images, audio and files are refused"),
    _honoured("model", "any name; it is repeated in the answer, and the session's policy answers"),
    _honoured("max_tokens", "512 without it; bounded by the context length"),
    _honoured("max_completion_tokens", "the newer name of max_tokens; both may be given if they agree"),
    _honoured("n", "1 to 128 answers, remembered as siblings"),
    _honoured("temperature", "0 to 2, default 1; 0 takes the most probable token"),
    _honoured("top_p", "above 0, up to 1, default 1"),
    _honoured("top_k", "0 or -1: off"),
    _honoured("min_p", "0 to 1, default 0: off"),
    _honoured("frequency_penalty", "-2 to 2"),
    _honoured("presence_penalty", "-2 to 2"),
    _honoured("repetition_penalty", "above 0, default 1"),
    _honoured("logit_bias", "token id to a bias of -100 to 100"),
    _honoured("stop", "up to 16 strings; the text ends before the first of them"),
    _honoured("stop_token_ids", "beside the model's own"),
    _honoured("seed", "equal requests with equal seeds and weights sample equal tokens"),
    _honoured(
        "logprobs", "of the tokens that were sampled, end-of-turn token included; a stream has them in its last chunk"
    ),
    _honoured("top_logprobs", "0 to 20, with logprobs"),
    _honoured(
        "tools", "functions; with strict, a call that tool_choice demands satisfies all of the schema or is refused"
    ),
    _honoured("tool_choice", "auto, none, required, a function, allowed_tools; what is demanded is enforced"),
    _honoured(
        "parallel_tool_calls",
        "false: only the first call of an answer counts, and a call that is demanded is the only one",
    ),
    _honoured(
        "response_format", "text, json_object and json_schema, enforced; with tools, the answer is a call or matches"
    ),
    _honoured("stream", "server-sent events as tokens are sampled"),
    _honoured("stream_options", "include_usage; include_obfuscation is ignored"),
    _honoured("store", "false: answered, and not trained"),
    _honoured("metadata", "kept with the interaction; agent names the agent of a multi-agent episode"),
    _honoured("chat_template_kwargs", "passed to the chat template"),
    _honoured("session_id", "names the session, beside the key that owns it"),
    _inert("user", "sessions identify who asks"),
    _inert("safety_identifier", "sessions identify who asks"),
    _inert("service_tier", "there is one"),
    _inert("priority", "requests are served in order of arrival"),
    _inert("prediction", "would save time only"),
    _inert("prompt_cache_key", "prefixes are cached without it"),
    _inert("prompt_cache_options", "prefixes are cached without it"),
    _inert("prompt_cache_retention", "prefixes are cached without it"),
    _inert("cache_salt", "prefixes are cached without it"),
    _inert("request_id", "answers have ids of their own"),
    _refused("audio", "this model writes text only"),
    _refused("modalities", "this model writes text only", ["text"]),
    _refused("function_call", "deprecated; use tool_choice", "auto", "none"),
    _refused("functions", "deprecated; use tools"),
    _refused("moderation", "nothing is moderated here"),
    _refused("reasoning_effort", _REASONING),
    _refused("verbosity", "ask for it in the prompt", "medium"),
    _refused("web_search_options", "the model sees the messages only"),
    _refused("best_of", "use n, and choose", 1),
    _refused("use_beam_search", "tokens are sampled one by one", False),
    _refused("length_penalty", "belongs to beam search", 1, 1.0),
    _refused("ignore_eos", "the model decides when its turn ends", False),
    _refused("min_tokens", "the model decides when its turn ends", 0),
    _refused("bad_words", "use logit_bias"),
    _refused("echo", "the prompt is not repeated", False),
    _refused("continue_final_message", "an answer is a turn of its own", False),
    _refused("add_generation_prompt", "an answer is a turn of its own", True),
    _refused("include_stop_str_in_output", "the text ends before the stop string", False),
    _refused("skip_special_tokens", "what is special never reaches the text", True),
    _refused("chat_template", "the model's own template is what it is trained with"),
    _refused("documents", "put them into the messages"),
    _refused("prompt_logprobs", "only sampled tokens are captured", 0),
    _refused("return_token_ids", "export the session to read its tokens", False),
    _honoured("guided_json", "a schema or its text; vLLM's name of response_format"),
    _honoured("guided_regex", "without look-around and back-references"),
    _honoured("guided_choice", "the texts of which the answer is one"),
    _refused("guided_grammar", _NO_EBNF),
    _honoured("structured_outputs", "one of json, json_object, regex and choice"),
    _honoured("json_schema", "SGLang's name of guided_json"),
    _honoured("regex", "SGLang's name of guided_regex"),
    _refused("ebnf", _NO_EBNF),
)

CHAT_PARAMETERS = ParameterTable(operation="chat completions", parameters=_CHAT)
