"""The tokenizer of the model: byte-level, as those of today's models, and its tokens are words of four characters."""

from __future__ import annotations

from areal_actors.models.built_in import CHATML
from areal_actors.rendering import TemplateRenderer, create_renderer

__all__ = ["FIRST_WORD", "NUM_WORDS", "create_word_renderer", "words"]

NUM_WORDS = 1000
_SPECIAL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
_DIGITS = "0123456789"


def words(start: int, num: int) -> str:
    """Text of so many tokens."""
    return "".join(f"w{number % NUM_WORDS:03}" for number in range(start, start + num))


def _pairs() -> list[tuple[str, str]]:
    """Merges that make one token of ``w`` and three digits."""
    prefixes = ["w"]
    pairs = []
    for _ in range(3):
        pairs += [(prefix, digit) for prefix in prefixes for digit in _DIGITS]
        prefixes = [prefix + digit for prefix in prefixes for digit in _DIGITS]
    return pairs


def _tokens() -> list[str]:
    from tokenizers import pre_tokenizers

    merged = ["".join(pair) for pair in _pairs()]
    # The words come last, in order, so that any run of their ids is text.
    return [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *merged]


FIRST_WORD = len(_SPECIAL) + 256 + 10 + 100
"""Id of the first word."""


def create_word_renderer() -> TemplateRenderer:
    """ChatML over that tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(_tokens())}
    backend = Tokenizer(models.BPE(vocabulary, _pairs()))
    pieces = pre_tokenizers.Split(Regex(r"w\d\d\d|\w+|\s"), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = CHATML
    return create_renderer(tokenizer)
