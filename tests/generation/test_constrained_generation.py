"""Grammars in the engine: what a constraint does to a generation, to its neighbours, and to how it ends."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import anyio
import numpy as np
import pytest
from attrs import evolve

from areal_actors.domain import (
    EngineRequest,
    Exactly,
    FinishReason,
    MatchingRegex,
    SampleKey,
    Sampling,
    Snapshot,
    Tool,
    as_ints,
)
from areal_actors.errors import UnsupportedParameter
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.rendering.parsers import TOOL_FORMATS

pytestmark = pytest.mark.anyio

V = 400
STOP = 2
TOOL = Tool(name="f", parameters={"properties": {"a": {"enum": [1, 2, 3]}}, "additionalProperties": False})


@cache
def tokenizer() -> Any:
    """The tiny tokenizer, made once."""
    return create_tiny_tokenizer()


def encode(text: str) -> list[int]:
    """Ids of a text."""
    return tokenizer().encode(text, add_special_tokens=False)


CONFIG = TorchEngineConfig(dtype="float32", max_concurrent=4, prefill_chunk=16)
CALL = TOOL_FORMATS["hermes"].constrain([TOOL], is_parallel=False)


@asynccontextmanager
async def open_engine(create_llama, **settings):
    """The tiny model's tokenizer, and a model with logits of its own."""
    config = evolve(CONFIG, **settings)
    async with TorchEngine.open(config, model=create_llama(V), tokenizer=tokenizer().backend_tokenizer) as engine:
        yield engine


def ask(number: int, grammar=None, *, stop=(STOP,), **sampling) -> EngineRequest:
    """A request with a prompt of its own number."""
    return EngineRequest(
        id=str(number),
        prompt=as_ints([5, 6, 7, number % 3]),
        sampling=Sampling(**{"max_new_tokens": 200} | sampling),
        key=SampleKey(seed=number),
        stop_token_ids=stop,
        grammar=grammar,
    )


async def answer(engine: TorchEngine, request: EngineRequest):
    """Ids, log-probabilities, raw ones, and how it ended."""
    async with engine.generate(request) as chunks:
        seen = [chunk async for chunk in chunks]
    columns = ([c.token_ids for c in seen], [c.logprobs for c in seen], [c.raw_logprobs for c in seen])
    return (*(np.concatenate(column).tolist() for column in columns), seen[-1].finish)


async def test_constrained_rows_do_not_change_free_ones(create_llama):
    """Nor the other way round: with equal company or none, every request samples what it would alone."""
    requests = [ask(n, CALL if n % 2 else None, max_new_tokens=30) for n in range(8)]
    together: dict[str, Any] = {}

    async def run(engine: TorchEngine, request: EngineRequest) -> None:
        together[request.id] = await answer(engine, request)

    async with open_engine(create_llama, deterministic=True) as engine:
        alone = {request.id: await answer(engine, request) for request in requests}
        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(run, engine, request)

    assert alone == together


async def test_forced_tokens_have_probability_one(create_llama):
    """Log-probabilities are those under the mask; the raw ones remain the model's."""
    async with open_engine(create_llama) as engine:
        ids, logprobs, raw, finish = await answer(engine, ask(0, Exactly(text="said and done")))

    assert tokenizer().decode(ids) == "said and done<|im_end|>"
    assert logprobs == [0.0] * len(ids)
    assert max(raw) < 0
    assert finish is FinishReason.STOP


async def test_answer_ends_where_nothing_can_follow(create_llama):
    """Without a stop token, or without room for one, it has come to its end all the same; with less room it has not."""
    text = encode("said and done")
    async with open_engine(create_llama) as engine:
        endless = await answer(engine, ask(0, Exactly(text="said and done"), stop=()))
        full = await answer(engine, ask(1, Exactly(text="said and done"), max_new_tokens=len(text)))
        cut = await answer(engine, ask(2, Exactly(text="said and done"), max_new_tokens=len(text) - 1))
        open_end = await answer(engine, ask(3, MatchingRegex(pattern="a+"), max_new_tokens=3, stop=()))

    assert (endless[0], endless[3]) == (full[0], full[3]) == (text, FinishReason.STOP)
    assert (cut[0], cut[3]) == (text[:-1], FinishReason.LENGTH)
    assert (tokenizer().decode(open_end[0]), open_end[3]) == ("aaa", FinishReason.LENGTH)


async def test_constrained_answer_continues_with_new_weights(create_llama):
    """A pause, other weights and computing anew are between two tokens of one answer, which still matches."""
    snapshot = Snapshot(version=1, state=create_llama(V, seed=1).state_dict())
    async with open_engine(create_llama) as engine, engine.generate(ask(1, CALL)) as chunks:
        seen = [await anext(aiter(chunks)) for _ in range(2)]
        await engine.pause()
        await engine.load(snapshot)
        await engine.resume()
        seen += [chunk async for chunk in chunks]
        again = await answer(engine, ask(4, CALL))

    texts = [tokenizer().decode(np.concatenate([c.token_ids for c in seen])), tokenizer().decode(again[0])]
    assert {chunk.version for chunk in seen} == {0, 1}
    assert all(re.fullmatch(r"<tool_call>\n.*\n</tool_call><\|im_end\|>", text, re.DOTALL) for text in texts)


async def test_exhausted_grammar_ends_only_its_generation(create_llama):
    """A vocabulary without the letters that must come: an error that says so, and the engine lives on."""
    async with TorchEngine.open(CONFIG, model=create_llama(100), tokenizer=tokenizer().backend_tokenizer) as engine:
        with pytest.raises(UnsupportedParameter, match="cannot be constrained to this form: no token"):
            await answer(engine, ask(0, Exactly(text="{é}")))
        assert (await answer(engine, ask(1, max_new_tokens=5)))[0]


async def test_expression_that_grows_too_large_is_refused(create_llama):
    """It compiles, and the lexer gives up behind the first characters: the request's fault, not the engine's."""
    async with open_engine(create_llama) as engine:
        with pytest.raises(UnsupportedParameter, match="cannot be constrained to this form: lexer error"):
            await answer(engine, ask(0, MatchingRegex(pattern="a{1000000}"), max_new_tokens=64))
        assert (await answer(engine, ask(1, max_new_tokens=5)))[0]


async def test_engine_without_tokenizer_refuses_grammars(create_llama):
    """Before anything runs."""
    async with TorchEngine.open(CONFIG, model=create_llama(V)) as engine:
        assert not engine.info.has_grammars
        with pytest.raises(UnsupportedParameter, match="without one"):
            await answer(engine, ask(0, CALL))
