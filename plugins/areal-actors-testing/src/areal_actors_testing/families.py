"""Chat templates like those of the main families of models, each with a small tokenizer with its special tokens.

They behave like the real ones where it matters here: what they show, drop, move, trim and reject. Their text is
shorter, and their vocabulary is the tiny one, so that a renderer is built in milliseconds. Tests of clients, sessions
and renderers draw from ``FAMILIES``; ``Family.write`` writes an answer as a model of the family would.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import resources
from typing import Any

from attrs import frozen

from areal_actors.domain import ToolCall
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.rendering import Renderer, create_renderer
from areal_actors.rendering.parsers import TOOL_FORMATS


@frozen(kw_only=True)
class Family:
    """A family of models: its template, its special tokens, and the format of its answers."""

    name: str
    start: str
    """The token at the beginning of a text."""
    end: str
    """The token that ends an answer."""
    end_of_calls: str | None = None
    """The token that ends an answer with calls, if it differs from ``end``."""
    special: tuple[str, ...] = ()
    """Additional special tokens."""
    is_stripping: bool = False
    """Whether special tokens include the white space after them."""
    tool_format: str
    """The tool format that is recognised, or used instead."""
    reasoning_format: str | None = None
    thought: str = ""
    """Format of reasoning, with ``{}`` for its text; empty if models do not reason."""
    is_thinking: bool = False
    """Whether every answer has the syntax of reasoning, even around no text."""
    content: str = "{}"
    """Format of the text of an answer."""
    content_before_calls: str = "{}\n"
    """Format of text that precedes calls."""
    between_calls: str = "\n"

    @property
    def template(self) -> str:
        """The Jinja source of the chat template."""
        path = resources.files("areal_actors_testing") / "chat_templates" / f"{self.name}.jinja"
        return path.read_text(encoding="utf-8")

    def create_renderer(self) -> Renderer:
        """Return the renderer of this family, which is created once."""
        return _create_renderer(self)

    def write(
        self, content: str = "", calls: Sequence[tuple[str, Mapping[str, object]]] = (), thought: str = ""
    ) -> str:
        """Return an answer as a model of this family would write it, with special tokens but without the end token.

        ``calls`` are names and arguments.
        """
        form = TOOL_FORMATS[self.tool_format]
        written = [
            form.format_call(ToolCall(id="", name=name, arguments=json.dumps(arguments, ensure_ascii=False)))
            for name, arguments in calls
        ]
        before = self.thought.format(thought) if thought or self.is_thinking else ""
        pattern = self.content_before_calls if calls else self.content
        return before + (pattern.format(content) if content else "") + self.between_calls.join(written)

    def sample(self, text: str, *, has_calls: bool = False) -> list[int]:
        """Return the ids of an answer made by ``write``, including the token that ends it."""
        end = self.end_of_calls if has_calls and self.end_of_calls else self.end
        return self.create_renderer().vocabulary.encode(text + end)


@cache
def _create_renderer(family: Family) -> Renderer:
    from tokenizers import AddedToken

    tokenizer = create_tiny_tokenizer(template=family.template)
    texts = dict.fromkeys((*family.special, family.end_of_calls or family.end))
    more = [AddedToken(text, rstrip=family.is_stripping, special=True) for text in texts]
    end = AddedToken(family.end, rstrip=family.is_stripping, special=True)
    special: dict[str, Any] = {"bos_token": family.start, "eos_token": end, "additional_special_tokens": more}
    tokenizer.add_special_tokens(special)
    ids = tokenizer.get_vocab()
    ends = [ids[text] for text in (family.end, family.end_of_calls) if text]
    return create_renderer(tokenizer, stop_token_ids=ends)


_chatml = partial(Family, start="<|im_start|>", end="<|im_end|>", tool_format="hermes")
_llama = partial(
    Family,
    start="<|begin_of_text|>",
    end="<|eot_id|>",
    special=("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
    tool_format="llama-json",
    between_calls="; ",
)
_mistral = partial(
    Family,
    start="<s>",
    end="</s>",
    special=(
        *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        *("[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ),
    tool_format="mistral",
    content_before_calls="{}",
    between_calls="",
)
_deepseek = partial(
    Family,
    start="<｜begin▁of▁sentence｜>",
    end="<｜end▁of▁sentence｜>",
    special=(
        *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ),
    tool_format="deepseek-v3",
    content_before_calls="{}",
    between_calls="",
)
_gemma = partial(Family, start="<bos>", end="<end_of_turn>", special=("<start_of_turn>",), tool_format="hermes")

_ALL = (
    _chatml(name="smollm2"),
    _chatml(name="qwen2.5"),
    _chatml(name="qwen3", reasoning_format="think", thought="<think>\n{}\n</think>\n\n"),
    _chatml(name="qwen3-coder", tool_format="qwen-coder", content_before_calls="{}\n\n"),
    _chatml(name="hermes-3"),
    _llama(name="llama-3.1"),
    _llama(name="llama-3.2"),
    _mistral(name="mistral-v3"),
    _mistral(name="mistral-v7"),
    _mistral(
        name="magistral",
        tool_format="mistral-args",
        reasoning_format="mistral-think",
        thought="[THINK]{}[/THINK]",
    ),
    _deepseek(name="deepseek-v3"),
    _deepseek(name="deepseek-r1", reasoning_format="think", thought="{}\n</think>\n\n", is_thinking=True),
    _deepseek(name="deepseek-v3.1", tool_format="deepseek-v3.1", reasoning_format="think"),
    Family(
        name="gpt-oss",
        start="<|startoftext|>",
        end="<|return|>",
        end_of_calls="<|call|>",
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
        tool_format="harmony",
        reasoning_format="harmony",
        thought="<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        content="<|channel|>final<|message|>{}",
        content_before_calls="<|channel|>commentary<|message|>{}<|end|><|start|>assistant",
        between_calls="<|start|>assistant",
    ),
    _gemma(name="gemma-2"),
    _gemma(name="gemma-3"),
    Family(
        name="gemma-4",
        start="<bos>",
        end="<turn|>",
        end_of_calls="<|tool_response>",
        special=(
            *("<|turn>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<tool_response|>", '<|"|>'),
            *("<|channel>", "<channel|>"),
        ),
        tool_format="gemma",
        reasoning_format="gemma-think",
        thought="<|channel>thought\n{}\n<channel|>",
        content_before_calls="{}",
        between_calls="",
    ),
    Family(
        name="phi-3",
        start="<s>",
        end="<|end|>",
        special=("<|system|>", "<|user|>", "<|assistant|>"),
        is_stripping=True,
        tool_format="hermes",
    ),
    _chatml(name="phi-4", special=("<|im_sep|>",)),
    Family(
        name="glm-4.5",
        start="<sop>",
        end="<|user|>",
        end_of_calls="<|observation|>",
        special=("[gMASK]", "<|system|>", "<|assistant|>", "/nothink"),
        tool_format="glm",
        reasoning_format="think",
        thought="\n<think>{}</think>\n",
        is_thinking=True,
    ),
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
"""All families by name."""
