"""Fields of JSON requests: each is declared once, and parsing, refusal and the OpenAPI document follow from it.

A ``Kind`` is a type of value: its JSON schema, and the function that reads it. A ``Field`` is a name, its support and,
if it is honoured, its kind. A ``FieldTable`` has all fields of one route. ``docs/reference/fields.md`` lists them, and
the tests compare them with the parameters of the SDKs.

A name that is not in the table is refused. An unknown name is either a misspelling (``temperatur``), whose effect would
silently be missing from the training data, or a feature whose effect is unknown. OpenAI's own endpoint refuses unknown
names as well, so no client relies on them being ignored. Users who know that a name does not matter list it in
``ProxyConfig.inert_parameters``.

``null`` counts as absent everywhere, because several clients send it for fields that they do not set: at the top and
within the values, which are read without it. Only values that belong to the user (JSON schemas, arguments of calls,
options of a chat template) are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from functools import partial
from typing import Any, Generic, TypeVar, overload

from attrs import Factory, evolve, field, frozen

from areal_actors.errors import InvalidRequest, UnsupportedParameter
from areal_actors.lib.shown_values import show_value

T = TypeVar("T")
D = TypeVar("D")
JsonObject = Mapping[str, Any]
"""An object of a client's JSON; its values are checked where they are read."""
Schema = JsonObject

DEFAULT_MAX_TOKENS = 512
MAX_TOKENS = 2**31 - 1
"""The largest token id, and the largest limit of new tokens."""
NO_EFFECT: tuple[Schema, ...] = (
    {"type": "null"},
    {"type": "array", "maxItems": 0},
    {"type": "object", "maxProperties": 0},
)
"""Schemas of values that are accepted under any name."""

_MAX_STOPS = 16
_MAX_SHOWN = 40
_MAX_SHOWN_NAME = 64
_MAX_DIGITS = len(str(MAX_TOKENS))


# ------------------------------------------------------------------------------------------------------- tables


class Support(StrEnum):
    """How a field is handled."""

    HONOURED = "honoured"
    INERT = "inert"
    """Accepted and ignored, because it cannot change the answer."""
    REFUSED = "refused"
    """Answered with 400, because it would change the answer and cannot be honoured."""


@frozen
class Kind(Generic[T]):
    """A type of value. ``read(value, name)`` returns a value that is not ``null``, or raises ``RequestError``.

    A value that ``is_raw`` is read as it was sent; from all others, ``without_nulls`` takes what is absent.
    """

    schema: Schema
    read: Callable[[Any, str], T]
    is_raw: bool = False


@frozen(kw_only=True)
class Field:
    """One field of a route.

    ``neutral`` values have no effect, so they are accepted even if the field is refused. A field without ``kind`` is
    not read.
    """

    name: str
    support: Support
    note: str = ""
    kind: Kind[Any] | None = None
    default: Any = None
    is_required: bool = False
    neutral: tuple[Any, ...] = ()

    @property
    def schema(self) -> Schema:
        """The values that are accepted, as a JSON schema."""
        if self.support is Support.INERT:
            return {"description": f"Accepted and ignored: {self.note}."}
        if self.support is Support.REFUSED:
            neutral = [{"const": value} for value in self.neutral]
            return {"description": f"Refused: {self.note}.", "anyOf": [*neutral, *NO_EFFECT]}
        return {**(self.kind.schema if self.kind else {}), "description": self.note}


def honoured(name: str, kind: Kind[Any], note: str, *, default: Any = None, is_required: bool = False) -> Field:
    """Return a field that changes the answer."""
    return Field(name=name, support=Support.HONOURED, kind=kind, note=note, default=default, is_required=is_required)


def inert(name: str, note: str) -> Field:
    """Return a field that is accepted and ignored."""
    return Field(name=name, support=Support.INERT, note=note)


def refused(name: str, note: str, *neutral: Any) -> Field:
    """Return a field whose values are refused, except ``neutral`` ones."""
    return Field(name=name, support=Support.REFUSED, note=note, neutral=neutral)


def unknown(name: str, known: Iterable[str], operation: str) -> UnsupportedParameter:
    """Return the error for a name that is not ``known`` in requests of ``operation``, with the nearest one that is."""
    shown_name = name[:_MAX_SHOWN_NAME]
    near = get_close_matches(shown_name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "leave it out."
    return UnsupportedParameter(
        f"{shown_name!r} is not a parameter of {operation}; {hint} "
        "If it does not matter, list it in the proxy's inert_parameters.",
        param=shown_name,
    )


@frozen
class FieldTable:
    """The fields of one route. ``operation`` names the route in error messages."""

    operation: str
    fields: tuple[Field, ...]
    _by_name: Mapping[str, Field] = field(
        init=False,
        repr=False,
        eq=False,
        default=Factory(lambda self: {each.name: each for each in self.fields}, takes_self=True),
    )

    def read(self, body: JsonObject, *, inert: Collection[str] = ()) -> dict[str, Any]:
        """Return the value of every honoured field, or its default.

        ``null`` and empty lists and objects have no effect and are accepted under any name. ``inert`` are further names
        to accept and ignore.

        Raises:
            UnsupportedParameter: a field that cannot be honoured; the error names it and the reason.
            InvalidRequest: a value that does not fit; ``param`` names the field.
        """
        values = {each.name: each.default for each in self.fields if each.kind is not None}
        for name, value in body.items():
            if value is None:
                continue
            found = self._by_name.get(name)
            if found is not None and found.kind is not None:
                values[name] = found.kind.read(value if found.kind.is_raw else without_nulls(value), name)
                continue
            if name in inert or without_nulls(value) in ([], {}):
                continue
            if found is None:
                raise unknown(name, self._by_name, self.operation)
            # ``True`` equals 1 in Python, but ``"n": true`` is not ``"n": 1``.
            is_neutral = any(
                value == known and isinstance(value, bool) is isinstance(known, bool) for known in found.neutral
            )
            if found.support is Support.REFUSED and not is_neutral:
                raise UnsupportedParameter(f"{name} is not supported: {found.note}.", param=name)
        for each in self.fields:
            if each.is_required and body.get(each.name) is None and each.kind is not None:
                # Raises an error that names the type that is missing.
                each.kind.read(None, each.name)
        return values

    def ignoring(self, names: Collection[str]) -> FieldTable:
        """Return the table with further ``names`` to ignore; honoured fields stay honoured."""
        kept = [each for each in self.fields if each.support is Support.HONOURED or each.name not in names]
        new = sorted(set(names) - {each.name for each in kept})
        return evolve(self, fields=(*kept, *(inert(name, "named in the settings") for name in new)))

    @property
    def schema(self) -> Schema:
        """The JSON schema of a request body.

        It describes each field separately. Invalid combinations (``top_logprobs`` without ``logprobs``) and values that
        depend on the model are not described; they are answered with 400.
        """
        return {
            "type": "object",
            "properties": {each.name: each.schema for each in self.fields},
            "required": [each.name for each in self.fields if each.is_required],
            "additionalProperties": {"anyOf": list(NO_EFFECT)},
        }


# ------------------------------------------------------------------------------------------------ kinds of values

_OF_USERS = frozenset({"parameters", "input_schema", "schema", "json", "output_schema"})
"""Keys in objects of the APIs whose values are JSON schemas."""


def without_nulls(value: Any) -> Any:
    """Return a value of an API without the keys whose value is ``null``, at any depth above JSON schemas."""
    if isinstance(value, dict):
        return {
            name: inner if name in _OF_USERS else without_nulls(inner)
            for name, inner in value.items()
            if inner is not None
        }
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


@overload
def read(body: JsonObject, name: str, kind: Kind[T]) -> T | None: ...


@overload
def read(body: JsonObject, name: str, kind: Kind[T], default: D) -> T | D: ...


def read(body: JsonObject, name: str, kind: Kind[T], default: D | None = None) -> T | D | None:
    """Return the value of one field of ``body``, or ``default`` if it is absent. Raises ``InvalidRequest``."""
    value = body.get(name)
    return default if value is None else kind.read(value, name)


def number(low: float, high: float, *, is_open: bool = False) -> Kind[float]:
    """Return the kind of numbers from ``low`` (excluded if ``is_open``) to ``high``."""

    def parse(value: Any, name: str) -> float:
        # ``True`` is an ``int`` in Python, but not a number in JSON.
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (is_open and value == low):
            raise wrong(name, f"a number {'above' if is_open else 'from'} {low:g} to {high:g}", value)
        return float(value)

    edge = {"exclusiveMinimum": low} if is_open else {"minimum": low}
    return Kind({"type": ["number", "null"], **edge, "maximum": high}, parse)


def integer(low: int, high: int) -> Kind[int]:
    """Return the kind of integers from ``low`` to ``high``; ``3.0`` is accepted as 3."""

    def parse(value: Any, name: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise wrong(name, f"an integer from {low} to {high}", value)
        return value

    return Kind({"type": ["integer", "null"], "minimum": low, "maximum": high}, parse)


def read_instance(kind: type[T], wanted: str, value: Any, name: str) -> T:
    """Return ``value`` if it is of class ``kind``. Raises ``InvalidRequest``, which says that ``wanted`` is needed."""
    if not isinstance(value, kind):
        raise wrong(name, wanted, value)
    return value


_read_object: Callable[[Any, str], dict[str, Any]] = partial(read_instance, dict, "an object")


def _read_text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise wrong(name, "a string that is not empty", value)
    return value


def _read_texts(value: Any, name: str) -> Mapping[str, str]:
    for key, text in _read_object(value, name).items():
        if not isinstance(text, str):
            raise wrong(name, "an object of strings", {key: text})
    return value  # type: ignore[no-any-return]  # checked above


def _read_stop(value: Any, name: str) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    is_valid = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    if not is_valid or len(stops) > _MAX_STOPS:
        raise wrong(name, f"a string or up to {_MAX_STOPS} strings, none of them empty", value)
    return tuple(stops)


def is_token_id(value: Any) -> bool:
    """Return whether ``value`` is a token id; ``3.0`` is an integer in JSON, and ``true`` is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= MAX_TOKENS and value == int(value)


def _read_token_ids(value: Any, name: str) -> tuple[int, ...]:
    tokens = value or []
    if not isinstance(tokens, list) or not all(map(is_token_id, tokens)):
        raise wrong(name, "a list of token ids", value)
    return tuple(map(int, tokens))


def _read_logit_bias(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    pairs: list[tuple[int, float]] = []
    for token, bias in _read_object(value, name).items():
        # Only canonical spellings: "7" and "07" would be two biases of one token.
        is_id = token.isascii() and token.isdigit() and len(token) <= _MAX_DIGITS and str(int(token)) == token
        if not is_id or int(token) > MAX_TOKENS:
            raise wrong(name, "an object whose keys are token ids", token)
        pairs.append((int(token), 0.0 if bias is None else _BIAS.read(bias, token)))
    return tuple(sorted(pairs))


def required_text(raw: JsonObject, name: str, where: str) -> str:
    """Return a text that must be there. Raises ``InvalidRequest``."""
    value = raw.get(name)
    if not isinstance(value, str) or not value:
        raise wrong(f"{where}.{name}", "a string that is not empty", value)
    return value


def optional_text(raw: JsonObject, name: str, where: str) -> str | None:
    """Return a text that may be missing; an empty one is as good as none. Raises ``InvalidRequest``."""
    value = raw.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong(f"{where}.{name}", "a string", value)
    return value or None


def objects_of(value: object, where: str) -> list[tuple[dict[str, Any], str]]:
    """Return the objects in a list, each with its place for error messages. Raises ``InvalidRequest``."""
    found: list[tuple[dict[str, Any], str]] = []
    for index, raw in enumerate(read_instance(list, "a list", value, where)):
        at = f"{where}[{index}]"
        found.append((read_instance(dict, "an object", raw, at), at))
    return found


def flag_in(name: str) -> Kind[bool]:
    """Return the kind of objects of which only the flag called ``name`` is read; without it, they are false."""
    schema = {**OBJECT.schema, "properties": {name: FLAG.schema}}
    return Kind(schema, lambda value, where: read(_read_object(value, where), name, FLAG, default=False))


def unread(schema: Schema, *, is_raw: bool = False) -> Kind[Any]:
    """Return the kind of values that their dialect parses together with others, after the table was read."""
    return Kind(schema, lambda value, _: value, is_raw=is_raw)


def turns_of(*roles: str) -> Schema:
    """Return the schema of a conversation. It has what all messages have: their contents depend on their types."""
    turn = {"type": "object", "properties": {"role": {"enum": list(roles)}}, "required": ["role"]}
    return {"type": "array", "items": turn, "minItems": 1}


OBJECTS: Schema = {"type": ["array", "null"], "items": {"type": "object"}}
FLAG = Kind({"type": ["boolean", "null"]}, partial(read_instance, bool, "true or false"))
TEXT = Kind({"type": ["string", "null"], "minLength": 1}, _read_text)
ANY_TEXT = unread({"type": ["string", "null"]})
OBJECT: Kind[JsonObject] = Kind({"type": ["object", "null"]}, _read_object)
TEXTS = Kind({"type": ["object", "null"], "additionalProperties": {"type": ["string", "null"]}}, _read_texts)
_STOPS: Schema = {"items": {"type": "string", "minLength": 1}, "maxItems": 16}
_BIAS = number(-100, 100)


# --------------------------------------------------------------------------------- fields that dialects have alike

MODEL = honoured("model", TEXT, "any name; it is repeated in the answer, and the session's policy answers")
STREAM = honoured("stream", FLAG, "server-sent events as tokens are sampled", default=False)
STOP = honoured(
    "stop",
    Kind({"type": ["string", "array", "null"], **_STOPS}, _read_stop),
    "up to 16 strings; the text ends before the first of them; not searched in the thinking",
    default=(),
)
STOP_SEQUENCES = honoured(
    "stop_sequences",
    Kind({"type": ["array", "null"], **_STOPS}, _read_stop),
    "up to 16 strings; the text ends before the first of them, which stop_sequence names; not searched in the thinking",
    default=(),
)
NUM_CHOICES = honoured("n", integer(1, 128), "1 to 128 answers, remembered as siblings", default=1)
STREAM_OPTIONS = honoured(
    "stream_options",
    flag_in("include_usage"),
    "include_usage; include_obfuscation is ignored",
    default=False,
)
METADATA = honoured(
    "metadata", TEXTS, "kept with the interaction; agent names the agent of a multi-agent episode", default={}
)
STORE = honoured(
    "store",
    FLAG,
    "false: answered, and not trained; ignored where proxy.honour_store is false for the route",
    default=True,
)
CHAT_TEMPLATE_KWARGS = honoured(
    "chat_template_kwargs",
    Kind(OBJECT.schema, _read_object, is_raw=True),
    "passed to the chat template",
    default={},
)
SESSION_ID = honoured("session_id", ANY_TEXT, "names the session, in addition to the key that owns it")
SAMPLING = (
    honoured("temperature", number(0, 2), "0 to 2, default 1; 0 takes the most probable token", default=1.0),
    honoured("top_p", number(0, 1), "0 to 1, default 1; 0 takes the most probable token", default=1.0),
    honoured("top_k", integer(-1, MAX_TOKENS), "0 or -1: off", default=0),
    honoured("min_p", number(0, 1), "0 to 1, default 0: off", default=0.0),
    honoured("frequency_penalty", number(-2, 2), "-2 to 2", default=0.0),
    honoured("presence_penalty", number(-2, 2), "-2 to 2", default=0.0),
    honoured("repetition_penalty", number(0, 10, is_open=True), "above 0, default 1", default=1.0),
    honoured(
        "logit_bias",
        Kind(
            {
                "type": ["object", "null"],
                "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                "additionalProperties": _BIAS.schema,
            },
            _read_logit_bias,
        ),
        "token id to a bias of -100 to 100",
        default=(),
    ),
    honoured(
        "stop_token_ids",
        Kind(
            {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS}},
            _read_token_ids,
        ),
        "in addition to the model's own",
        default=(),
    ),
    honoured("seed", integer(-(2**63), 2**63 - 1), "equal requests with equal seeds and weights sample equal tokens"),
)
"""The fields of ``Sampling``, and the seed."""


def _read_effort(value: Any, name: str) -> JsonObject:
    if not isinstance(value, str) or value not in _EFFORTS:
        raise wrong(name, f"one of {', '.join(_EFFORTS)}", value)
    return _EFFORTS[value]


THINKING_SWITCH = "enable_thinking"
"""The option with which the chat templates of several model families turn thinking on and off."""
_EFFORTS: Mapping[str, JsonObject] = {
    "none": {THINKING_SWITCH: False},
    # Templates that have levels (gpt-oss) know these three; vendors' further levels are the nearest of them.
    **{level: {"reasoning_effort": "low"} for level in ("minimal", "low")},
    "medium": {"reasoning_effort": "medium"},
    **{level: {"reasoning_effort": "high"} for level in ("high", "xhigh", "max")},
}
EFFORT = Kind({"enum": [*_EFFORTS, None]}, _read_effort)
"""How much a model should think, as options of its chat template. A template without such an option ignores them."""
_THINKING: Mapping[str, JsonObject] = {
    "enabled": {THINKING_SWITCH: True},
    "disabled": {THINKING_SWITCH: False},
    "adaptive": {},
    "between_tools": {},
}


def _read_thinking(value: Any, name: str) -> JsonObject:
    kind = _read_object(value, name).get("type", "adaptive")
    if not isinstance(kind, str) or kind not in _THINKING:
        raise wrong(f"{name}.type", "enabled, disabled or adaptive", kind)
    return _THINKING[kind]


def _read_reasoning(value: Any, name: str) -> JsonObject:
    reasoning = _read_object(value, name)
    is_enabled = read(reasoning, "enabled", FLAG)
    effort = read(reasoning, "effort", EFFORT, {})
    return effort if is_enabled is None else {**effort, THINKING_SWITCH: is_enabled}


def _read_switch(value: Any, name: str) -> JsonObject:
    return {THINKING_SWITCH: FLAG.read(value, name)}


_KINDS_OF_THINKING: Schema = {"type": ["string", "null"], "enum": [*_THINKING, None]}
REASONING_EFFORT = honoured(
    "reasoning_effort",
    EFFORT,
    "a hint: reasoning_effort (low, medium, high) of chat templates that have it; none turns thinking off",
    default={},
)
REASONING = honoured(
    "reasoning",
    Kind(
        {**OBJECT.schema, "properties": {"effort": EFFORT.schema, "enabled": FLAG.schema}},
        _read_reasoning,
    ),
    "OpenRouter's name: effort as reasoning_effort, enabled as enable_thinking; max_tokens and exclude are ignored",
    default={},
)
THINKING = honoured(
    "thinking",
    Kind({**OBJECT.schema, "properties": {"type": _KINDS_OF_THINKING}}, _read_thinking),
    "enabled and disabled set enable_thinking for templates that have it; adaptive leaves it to them; budget_tokens "
    "and display are ignored",
    default={},
)
ENABLE_THINKING = honoured(
    "enable_thinking", Kind(FLAG.schema, _read_switch), "the switch of chat templates that have it", default={}
)
"""The fields by which vendors and servers ask for more or less thinking; each is read as options of a chat template."""


_GATEWAY = (
    inert("provider", "no other provider is asked"),
    inert("models", "the session's policy answers"),
    inert("route", "the session's policy answers"),
    inert("transforms", "nothing is ever dropped: a conversation that is too long is refused"),
)
"""Fields with which clients of OpenRouter choose among providers."""


ALL_ROUTES = (MODEL, STREAM, STORE, METADATA, SESSION_ID, *SAMPLING)
"""The fields of every route."""
CONVERSATIONS = (CHAT_TEMPLATE_KWARGS, THINKING, ENABLE_THINKING, *_GATEWAY)
"""The fields of the routes that answer conversations."""
OPENAI = (
    STOP,
    inert("user", "sessions identify who asks"),
    inert("service_tier", "there is one"),
    inert("priority", "requests are served in order of arrival"),
    inert("cache_salt", "prefixes are cached without it"),
    inert("request_id", "answers have ids of their own"),
)
"""The fields of OpenAI's routes, and of vLLM's and SGLang's."""
OPENAI_CONVERSATIONS = (
    *(inert(f"prompt_cache_{name}", "prefixes are cached without it") for name in ("key", "options", "retention")),
    inert("safety_identifier", "sessions identify who asks"),
    refused("moderation", "nothing is moderated here"),
)
OPENAI_CHUNKS = (
    NUM_CHOICES,
    STREAM_OPTIONS,
    refused("best_of", "use n, and choose", 1),
    refused("use_beam_search", "tokens are sampled one by one", False),
    refused("length_penalty", "belongs to beam search", 1, 1.0),
    refused("ignore_eos", "the model decides when its answer ends", False),
    refused("min_tokens", "the model decides when its answer ends", 0),
    refused("echo", "the prompt is not repeated", False),
    refused("include_stop_str_in_output", "the text ends before the stop string", False),
    refused("skip_special_tokens", "what is special never reaches the text", True),
    refused("prompt_logprobs", "only sampled tokens are captured", 0),
    refused("return_token_ids", "export the session to read its tokens", False),
)
"""The fields of chat completions and plain completions, whose streams are chunks with choices."""


# ------------------------------------------------------------------------------------------------------- errors


def shown(value: Any) -> str:
    """Return a short form of a JSON value for an error message; never longer than a line, whatever was sent."""
    return show_value(value, limit=_MAX_SHOWN)


def wrong(name: str, expected: str, value: Any) -> InvalidRequest:
    """Return the error for a field whose value does not fit."""
    return InvalidRequest(f"{name} must be {expected}, not {shown(value)}.", param=name)
