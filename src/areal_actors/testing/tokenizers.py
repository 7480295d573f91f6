"""A real tokenizer that takes milliseconds to build: byte-level BPE of 384 tokens, trained on a few sentences."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerFast

__all__ = ["CHATML", "SPECIAL_TOKENS", "tiny_tokenizer"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2: padding, beginning of a turn (and of text), end of a turn (and of text)."""

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Any role, no default system prompt, no tools."""

_VOCAB_SIZE = 384
_TEXT = (
    "You are a helpful assistant. Answer the question of the user in one short sentence.",
    "What is the sum of 12 and 30? The sum of 12 and 30 is 42. Let me think about the answer to this question.",
    'To call a tool, say: {"name": "multiply", "arguments": {"a": 12, "b": 34}} and then read the result: 408',
    "<tool_call>\n</tool_call>\n<tool_response>\n</tool_response>\n<think>\n</think>\n<tools>\n</tools>",
    "system user assistant tool higher lower between correct guess the number from 1 to 9",
)


def tiny_tokenizer(*, template: str = CHATML, more_special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A fast tokenizer with ``template`` as its chat template; equal arguments give equal ids, every time.

    Its beginning, end and padding tokens are ``SPECIAL_TOKENS``. ``more_special`` are added behind the 384 others.
    """
    from transformers import PreTrainedTokenizerFast

    padding, start, end = SPECIAL_TOKENS
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(_train()),
        bos_token=start,
        eos_token=end,
        pad_token=padding,
        unk_token=padding,
    )
    if more_special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(more_special)})
    tokenizer.chat_template = template
    return tokenizer


@cache
def _train() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer.to_str()
