"""A model of 0.2 million random parameters: what tests train, and what shows the machinery in seconds.

It knows nothing, but it is a real one: a Llama with a byte-level tokenizer and a ChatML template, in the layout that every
program loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from areal_actors.models.making import make_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["CHATML", "create_tiny", "create_tiny_tokenizer"]

FORMAT = 1
SEED = 0
VOCAB_SIZE = 384
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

_TEXT = (
    "What is the answer? The answer is 42. Call the tool with arguments, read its result and report the number.",
    '<tool_call>\n{"name": "multiply", "arguments": {"a": 12, "b": 34}}\n</tool_call>',
    "<tool_response>\n408\n</tool_response>",
    "user assistant system tool say think number letter word count one two three four five six seven eight nine ten",
)


def create_tiny(cache: Path) -> Path:
    """The tiny model below ``cache``, made if it is not there."""
    return make_once(cache / f"tiny-{FORMAT}", _save)


def create_tiny_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of ``VOCAB_SIZE`` ids; the same each time."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    )


def _save(target: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = create_tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # Wider than usual: a random model that is nearly uniform has little to reinforce.
        initializer_range=0.07,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
