"""Constraints: random schemas against random logits, and what a grammar allows, token by token."""

from __future__ import annotations

import json
from functools import cache, partial
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from areal_actors.domain import (
    Exactly,
    FreeText,
    InOrder,
    JsonText,
    MatchingRegex,
    OneOf,
    Repeated,
    Sampling,
    Tool,
    as_ints,
)
from areal_actors.errors import InvalidRequest, UnsupportedParameter
from areal_actors.generation.torch.constraint import Constraint, GrammarCompiler
from areal_actors.generation.torch.sampler import RowSampling, sample
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.rendering.parsers import REASONING_FORMATS, TOOL_FORMATS

V = 400
STOP = 2


@cache
def tokenizer(*more_special: str) -> Any:
    """The tiny tokenizer, made once."""
    return create_tiny_tokenizer(more_special=more_special)


@cache
def compiler(*more_special: str) -> GrammarCompiler:
    """A compiler for a model whose vocabulary is padded."""
    return GrammarCompiler(tokenizer(*more_special).backend_tokenizer, vocab_size=V)


def constrain(grammar, *, stop_ids=(STOP,), more_special=()) -> Constraint:
    """A constraint, without an event loop of one's own."""
    return anyio.run(partial(compiler(*more_special).compile, grammar, stop_ids=frozenset(stop_ids)))


def encode(text: str, *more_special: str) -> list[int]:
    """Ids of a text, the model's own way of cutting it."""
    return tokenizer(*more_special).encode(text, add_special_tokens=False)


# ------------------------------------------------------------------------------------------------- the law


def _objects(inner):
    return st.dictionaries(st.sampled_from(["a", "b", 'q"', "é"]), inner, max_size=3).flatmap(
        lambda properties: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(properties),
                "required": st.lists(st.sampled_from([*properties] or ["a"]), unique=True).map(
                    lambda names: [name for name in names if name in properties]
                ),
                "additionalProperties": st.just(False),
            }
        )
    )


scalars = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": "x/y"}, {"enum": [1, "two", None]}]),
    st.tuples(st.integers(-20, 0), st.integers(0, 300)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[1]}
    ),
    st.integers(0, 4).map(lambda length: {"type": "string", "maxLength": length}),
)
schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        _objects(inner),
        st.tuples(inner, st.integers(0, 2)).map(lambda x: {"type": "array", "items": x[0], "maxItems": x[1]}),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=5,
)


def is_valid(value, schema) -> bool:
    """The few words of JSON schema that ``schemas`` speaks, the obvious way."""
    if "anyOf" in schema:
        return any(is_valid(value, option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds = {"boolean": bool, "null": type(None), "integer": int, "string": str, "array": list, "object": dict}
    return type(value) is kinds[schema["type"]] and fits(value, schema)


def fits(value, schema) -> bool:
    """Whether a value of the right type is within the bounds of its schema."""
    match value:
        case str():
            return len(value) <= schema["maxLength"]
        case list():
            return len(value) <= schema["maxItems"] and all(is_valid(item, schema["items"]) for item in value)
        case dict():
            known = schema["properties"]
            is_known = set(schema["required"]) <= set(value) <= set(known)
            return is_known and all(is_valid(item, known[name]) for name, item in value.items())
        case _:
            return type(value) is not int or schema["minimum"] <= value <= schema["maximum"]


def draw_answer(constraint: Constraint, seed: int, *, num_tokens: int, **sampling) -> tuple[list[int], bool]:
    """What a model with random logits says, and whether it came to its end; every step is checked on its way."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(num_tokens):
        allowed = constraint.allowed()
        logits = torch.from_numpy(rng.normal(size=(1, V)).astype(np.float32)) * 3
        row = RowSampling(Sampling(**sampling), float(rng.random()), as_ints([5]), as_ints(ids), allowed)
        draw = sample(logits, [row])
        token = draw.token_ids[0]

        assert draw.is_finite == [True], constraint.failure
        assert allowed[token]
        if allowed.sum() == 1:
            assert draw.logprobs == [0]
        if token == STOP:
            return ids, True
        constraint.append(token)
        ids.append(token)
    return ids, False


@given(schemas, st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from([1.0, 0.5]))
@settings(deadline=None)
def test_constrained_answers_of_random_model_validate(schema, seed, temperature, top_p):
    """Every answer that comes to its end is JSON of the schema, however it was sampled."""
    constraint = constrain(JsonText(schema=schema))
    ids, is_complete = draw_answer(
        constraint,
        seed,
        num_tokens=150,
        temperature=temperature,
        top_p=top_p,
        logit_bias=((7, 50.0),),
        repetition_penalty=1.2,
    )

    assert not is_complete or is_valid(json.loads(tokenizer().decode(ids)), schema)


F = Tool(name="f", parameters={"type": "object", "properties": {"a": {"maximum": 9, "type": "integer", "minimum": 0}}})
G = Tool(name="g", parameters={"type": "object", "additionalProperties": False})
HERMES = TOOL_FORMATS["hermes"]
THINK = REASONING_FORMATS["think"]
TEXTS = {
    "calls": (
        HERMES.constrain([F, G], is_parallel=True),
        "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in "gfg"),
    ),
    "call after thoughts": (
        InOrder(parts=(THINK.constrain(is_open=False, has_calls=False), HERMES.constrain([F, G], is_parallel=False))),
        '<think>\nso </ think> what\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 3}}\n</tool_call>',
    ),
    "call without thoughts": (
        InOrder(parts=(THINK.constrain(is_open=False, has_calls=False), HERMES.constrain([F, G], is_parallel=False))),
        '<tool_call>\n{"name": "f", "arguments": {"a":3}}\n</tool_call>',
    ),
    "json after open thoughts": (
        InOrder(parts=(THINK.constrain(is_open=True, has_calls=False), JsonText())),
        'hm\n</think>\n\n{\n  "é": [1, null]\n}',
    ),
    "expression after thoughts": (
        InOrder(parts=(THINK.constrain(is_open=False, has_calls=False), MatchingRegex(pattern="^[a-z]+/[0-9]$"))),
        "<think></think>\n\nab/3",
    ),
    "text before a tag on a line of its own": (
        InOrder(parts=(FreeText(excluding=("</think>",)), Exactly(text="\n</think>\n"), JsonText())),
        "hm\n\n</think>\n[]",
    ),
    "what is optional left out before what begins alike": (
        InOrder(
            parts=(
                JsonText(schema={"type": "integer"}),
                Exactly(text="\n</p>\n"),
                OneOf(parts=(Exactly(text=""), Exactly(text="<p=u>\nc\n</p>\n"))),
                Repeated(part=Exactly(text="<q>"), at_least=0),
                Exactly(text="</f>"),
            )
        ),
        "3\n</p>\n</f>",
    ),
    "text": (FreeText(excluding=("</x>", 'a"b')), "any </y> text ☃ of\nlines"),
    "choice": (OneOf(parts=(Exactly(text="yes"), Exactly(text="yes!"))), "yes!"),
    "list": (Repeated(part=JsonText(schema={"type": "integer"}), separator=", "), "1, 22, 3"),
    "any json": (JsonText(), '{"a": [{"b": "c\\n"}, 1.5e3, true]}'),
}


@pytest.mark.parametrize("special", [(), ("<tool_call>", "</tool_call>", "</think>")], ids=["plain", "special"])
@pytest.mark.parametrize("name", TEXTS)
def test_matching_text_is_allowed_as_the_model_tokenizes_it(name, special):
    """The tokens that the model's own tokenizer cuts a matching text into are allowed, one after another."""
    grammar, text = TEXTS[name]
    constraint = constrain(grammar, more_special=special)
    for token in encode(text, *special):
        allowed = constraint.allowed()

        assert allowed[token], tokenizer(*special).decode(np.flatnonzero(allowed)[:40])
        constraint.append(token)
    assert constraint.allowed()[STOP]


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (FreeText(excluding=("</x>",)), "so </x>"),
        (OneOf(parts=(Exactly(text="yes"), Exactly(text="no"))), "yn"),
        (JsonText(schema={"type": "integer"}), '"'),
        (JsonText(schema={"type": "array"}), "[  "),
        (MatchingRegex(pattern="a+"), "ab"),
        (Repeated(part=Exactly(text="a"), at_most=2), "aaa"),
        (FreeText(), "a<|im_start|>"),
    ],
)
def test_text_that_does_not_match_is_not_allowed(grammar, text):
    """Sooner or later, on the way through the text; white space in JSON has an end, and special tokens are not text."""
    constraint = constrain(grammar)
    for token in encode(text):
        if not constraint.allowed()[token]:
            return
        constraint.append(token)
    pytest.fail(f"{text!r} was allowed")


def test_stop_tokens_are_allowed_exactly_where_an_answer_may_end():
    """Also one that stands for the end within the library, and none that is not a stop token here."""
    constraint = constrain(Exactly(text="yes"), stop_ids=(2, 1, 10**9, -1))

    assert not constraint.allowed()[[0, 1, 2]].any()
    for token in encode("yes"):
        constraint.append(token)
    assert np.flatnonzero(constraint.allowed()).tolist() == [1, 2]
    assert constraint.is_over


def test_constraints_of_equal_grammars_advance_separately():
    """The tokens of one generation change nothing for another."""
    grammar = JsonText(schema={"const": "kept"})
    first, second = constrain(grammar), constrain(grammar)
    first.append(int(np.flatnonzero(first.allowed())[0]))
    third = constrain(evolve(grammar))

    assert second.allowed().tolist() == third.allowed().tolist() != first.allowed().tolist()


@pytest.mark.parametrize(
    ("grammar", "error", "words"),
    [
        (MatchingRegex(pattern="("), UnsupportedParameter, "unclosed group"),
        (MatchingRegex(pattern=r"(a)\1"), UnsupportedParameter, "backreferences"),
        (JsonText(schema={"type": "odd"}), UnsupportedParameter, "odd"),
        (JsonText(schema={"$ref": "http://example.org/x"}), UnsupportedParameter, "example.org"),
        (JsonText(schema={"const": "\ud800"}), InvalidRequest, "surrogate"),
        (Exactly(text="\ud800"), InvalidRequest, "surrogates"),
        (Exactly(text="x" * 3_000_000), InvalidRequest, "3000010 characters"),
    ],
)
def test_unsupported_grammar_is_refused(grammar, error, words):
    """With the reason, and in a time that a client can wait for."""
    with pytest.raises(error, match=words):
        constrain(grammar)


def test_deep_schemas_are_refused():
    """Compilation does not overflow the stack."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(900):
        schema = {"type": "object", "properties": {"a": schema}}

    with pytest.raises(InvalidRequest):
        constrain(JsonText(schema=schema))


def test_unsupported_keywords_are_ignored_unless_schema_is_strict():
    """A tool's schema comes from elsewhere, and most of it is better than none."""
    schema = {"type": "array", "items": {"enum": [1]}, "uniqueItems": True}

    assert constrain(JsonText(schema=schema, is_strict=False)).allowed()[encode("[")[0]]
    with pytest.raises(UnsupportedParameter, match="uniqueItems"):
        constrain(JsonText(schema=schema))


def test_unsupported_tokenizer_is_named():
    """Without special tokens there is nothing that could stand for the end."""
    bare = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    with pytest.raises(UnsupportedParameter, match="special tokens"):
        anyio.run(partial(GrammarCompiler(bare, vocab_size=2).compile, Exactly(text="a"), stop_ids=frozenset()))
