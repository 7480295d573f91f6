"""One generation: what is refused, when it is over, and where its random numbers come from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import EngineInfo, EngineRequest, FinishReason, SampleKey, Sampling
from areal_actors.errors import ContextLengthExceeded, InvalidRequest
from areal_actors.generation.base import StopScanner, validate_request
from areal_actors.generation.torch.scheduler import Generation, create_uniforms

INFO = EngineInfo(
    name="torch", model="tiny", vocab_size=100, context_length=16, dtype="float32", device="cpu", max_concurrent=4
)
KEY = SampleKey(seed=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 2.0),
        ("max_new_tokens", 0),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", float("inf")),
        ("logit_bias", ((100, 1.0),)),
        ("logit_bias", ((1, float("nan")),)),
        ("top_logprobs", -1),
        ("stop", ("",)),
    ],
)
def test_invalid_sampling_parameters_are_refused_by_name(field, value):
    """The error names the parameter, for the client's SDK to read."""
    request = EngineRequest(id="a", prompt=[1], sampling=Sampling(**{field: value}), key=KEY)
    with pytest.raises(InvalidRequest) as caught:
        validate_request(request, INFO, can_decode=True)

    assert field == caught.value.param


@pytest.mark.parametrize("prompt", [[], [-1], [100], [1, 2, 2**31 - 1]])
def test_prompts_outside_the_vocabulary_are_refused(prompt):
    """Ids that the embedding does not have would read foreign memory."""
    with pytest.raises(InvalidRequest):
        validate_request(EngineRequest(id="a", prompt=prompt, key=KEY), INFO, can_decode=True)


def test_prompt_without_room_is_refused():
    """One token of output must fit."""
    validate_request(EngineRequest(id="a", prompt=[1] * 15, key=KEY), INFO, can_decode=False)
    with pytest.raises(ContextLengthExceeded):
        validate_request(EngineRequest(id="a", prompt=[1] * 16, key=KEY), INFO, can_decode=False)


def test_stop_strings_need_a_tokenizer():
    """An engine that was opened without one says so."""
    request = EngineRequest(id="a", prompt=[1], sampling=Sampling(stop=("x",)), key=KEY)
    with pytest.raises(InvalidRequest, match="tokenizer"):
        validate_request(request, INFO, can_decode=False)


def test_context_bounds_the_output():
    """A generation ends with LENGTH when prompt and output fill the context."""
    generation = Generation.create(EngineRequest(id="a", prompt=[1] * 14, key=KEY), context_length=16, decode=None)
    generation.append(5)
    assert generation.finish is None
    generation.append(6)

    assert generation.finish is FinishReason.LENGTH
    assert generation.output.tolist() == [5, 6]


@given(st.text("abc", max_size=60), st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3))
def test_stop_string_is_found_at_the_token_that_completes_it(text, stop):
    """The scanner that looks at a window agrees with looking at the whole text."""
    scanner = StopScanner(tuple(stop), lambda ids: "".join(map(chr, ids)))
    expected = next((i for i in range(len(text)) if any(s in text[: i + 1] for s in stop)), None)
    actual = next((i for i, char in enumerate(text) if scanner.is_complete(ord(char))), None)

    assert expected == actual


@given(num_earlier=st.integers(0, 5))
def test_stop_string_is_found_after_a_move_to_another_engine(num_earlier):
    """Its first tokens were sampled by an engine that died; they are at the end of the prompt of the next one."""
    text = [*map(ord, "xySTOP")]
    key = SampleKey(seed=1, num_drawn=num_earlier)
    request = EngineRequest(id="a", prompt=[1, *text[:num_earlier]], sampling=Sampling(stop=("STOP",)), key=key)
    decode = lambda ids: "".join(map(chr, ids))  # noqa: E731
    generation = Generation.create(request, context_length=99, decode=decode)
    finishes = []
    for token in text[num_earlier:]:
        generation.append(token)
        finishes.append(generation.finish)

    assert [None] * (5 - num_earlier) + [FinishReason.STOP] == finishes


def test_random_numbers_depend_only_on_the_key():
    """Equal keys give equal numbers; parts of a key cannot be mistaken for each other. The numbers are pinned."""
    keys = [SampleKey(seed=s, path=p) for s, p in [(1, ()), (1, (1,)), (1, ("1",)), (11, ()), (1, (1, 1)), (1, (11,))]]
    firsts = [create_uniforms(key)() for key in keys]
    again = create_uniforms(SampleKey(seed=1, path=(1,)))

    assert len(set(firsts)) == len(keys)
    assert firsts[1] == again()
    assert all(0 <= u < 1 for u in firsts)
    stream = create_uniforms(keys[0])
    third = [stream() for _ in range(3)][2]
    assert third == create_uniforms(SampleKey(seed=1, num_drawn=2))()  # as where it continues after two tokens
