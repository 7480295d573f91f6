"""The engine of the proxy's benchmarks: it samples one fixed answer at no cost, after a delay or in two pieces.

It comes with what the servers around it share: how they are set up, and the tokenizer whose tokens are as long as those
of real models.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import numpy as np
from attrs import evolve, frozen

from areal_actors.domain import (
    Chunk,
    EngineInfo,
    EngineRequest,
    EngineStatistics,
    FinishReason,
    PauseMode,
    Snapshot,
)
from areal_actors.models.built_in import CHATML, create_tiny_tokenizer
from areal_actors.rendering import TemplateRenderer, create_renderer

__all__ = ["NAME_OF_WORD", "SETUPS", "NullEngine", "Setup", "words"]

ANSWER = "The answer to this question is 42, as you know."
NAME_OF_WORD = "w{:03}"
"""Words of four characters: what a token of English text has in vocabularies of today."""


def words(numbers: list[int]) -> str:
    """Text of so many tokens of ``create_word_renderer``."""
    return "".join(NAME_OF_WORD.format(number % 1000) for number in numbers)


def create_tiny_renderer() -> TemplateRenderer:
    """The tiny model's: byte-level, so that its cost per character is that of a real one."""
    return create_renderer(create_tiny_tokenizer())


def create_word_renderer() -> TemplateRenderer:
    """One token per word of four characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "?": 3}
    vocabulary |= {NAME_OF_WORD.format(number): 4 + number for number in range(1000)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"w\d\d\d|\w+|\s"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", **special)
    tokenizer.chat_template = CHATML
    return create_renderer(tokenizer)


@frozen(kw_only=True)
class Setup:
    """What a server is measured with.

    Its engine waits ``delay_seconds`` before its first token, and ``pause_seconds`` between the first one and the
    others, which come together with it if that is zero, or one by one with ``has_single_tokens``. With
    ``has_raw_logprobs``, raw log-probabilities differ from the others, as they do at any temperature but 1.
    """

    num_sessions: int = 16
    delay_seconds: float = 0.0
    pause_seconds: float = 0.0
    answer: str = ANSWER
    has_single_tokens: bool = False
    has_raw_logprobs: bool = False
    create_renderer: Callable[[], TemplateRenderer] = create_tiny_renderer


SETUPS = {
    "idle": Setup(),
    "busy": Setup(num_sessions=1000, delay_seconds=0.1),
    "streaming": Setup(delay_seconds=0.02, pause_seconds=0.02),
    "tokens": Setup(
        delay_seconds=0.005,
        pause_seconds=0.005,
        has_single_tokens=True,
        answer=words(list(range(199))),
        create_renderer=create_word_renderer,
    ),
    "short": Setup(answer=words(list(range(49))), has_raw_logprobs=True, create_renderer=create_word_renderer),
    "long": Setup(answer=words(list(range(299))), has_raw_logprobs=True, create_renderer=create_word_renderer),
}
"""By name: a server's process is told one."""


class IdleEngine:
    """An engine without weights, of which nothing is asked but to generate."""

    version = 0

    async def abort(self, request_id: str) -> None:
        """Nothing runs."""

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Nothing runs."""

    async def resume(self) -> None:
        """Nothing waits."""

    async def load(self, snapshot: Snapshot) -> None:
        """There are no weights."""

    def statistics(self) -> EngineStatistics:
        """Nothing is counted."""
        return EngineStatistics()


class NullEngine(IdleEngine):
    """Samples the answer of its set-up."""

    def __init__(self, renderer: TemplateRenderer, setup: Setup) -> None:
        ids = [*renderer.vocabulary.encode(setup.answer), renderer.stop_token_ids[0]]
        self._setup = setup
        self.first_tokens: dict[str, float] = {}
        """When the first token of each request was sampled, by ``time.monotonic``; only where there is a pause."""
        self.info = EngineInfo(
            name="null",
            model="null",
            vocab_size=renderer.vocab_size,
            context_length=2**20,
            dtype="none",
            device="none",
            max_concurrent=2**20,
        )
        logprobs = np.full(len(ids), -0.5, dtype=np.float32)
        raw = logprobs * 1.1 if setup.has_raw_logprobs else logprobs
        self.chunk = Chunk(token_ids=ids, logprobs=logprobs, raw_logprobs=raw, version=0, finish=FinishReason.STOP)

        singles = [self._split(slice(number, number + 1)) for number in range(1, len(ids))]
        self._tokens = [evolve(each, finish=None) for each in singles[:-1]] + singles[-1:]

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Chunk]]:
        """One chunk, or two."""
        yield self._chunks() if not self._setup.pause_seconds else self._pieces(request.id)

    async def _chunks(self) -> AsyncIterator[Chunk]:
        if self._setup.delay_seconds:
            await anyio.sleep(self._setup.delay_seconds)
        yield self.chunk

    async def _pieces(self, request_id: str) -> AsyncIterator[Chunk]:
        await anyio.sleep(self._setup.delay_seconds)
        first, rest = self._split(slice(0, 1)), self._split(slice(1, None))
        self.first_tokens[request_id] = time.monotonic()
        yield evolve(first, finish=None)
        if self._setup.has_single_tokens:
            for chunk in self._tokens:
                await anyio.sleep(self._setup.pause_seconds)
                yield chunk
            return
        await anyio.sleep(self._setup.pause_seconds)
        yield rest

    def _split(self, part: slice) -> Chunk:
        whole = self.chunk
        arrays = {name: getattr(whole, name)[part] for name in ("token_ids", "logprobs", "raw_logprobs")}
        return evolve(whole, **arrays)
