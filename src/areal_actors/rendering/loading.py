"""Creation of a renderer from a model's tokenizer files: settings, template, special tokens, probes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from areal_actors.errors import ModelError
from areal_actors.rendering.adaptation import Adaptation
from areal_actors.rendering.parity import ParityProbe
from areal_actors.rendering.parsers import REASONING_FORMATS, TOOL_FORMATS, ToolFormat, choose_format
from areal_actors.rendering.probing import probe_adaptation
from areal_actors.rendering.renderer import TemplateRenderer
from areal_actors.rendering.suffix import SuffixRenderer, find_end_of_turn
from areal_actors.rendering.template import ChatTemplate
from areal_actors.rendering.tokens import Vocabulary
from areal_actors.rendering.typesetter import Typesetter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["RendererConfig", "create_renderer", "load_renderer"]


@frozen(kw_only=True)
class RendererConfig:
    """Settings of the conversion between messages and tokens.

    ``tool_format`` and ``reasoning_format`` are names of formats, ``auto`` (recognised by the chat template) or
    ``none``. ``chat_template`` is Jinja text that replaces the model's own.
    """

    tool_format: str = "auto"
    reasoning_format: str = "auto"
    chat_template: str | None = None


def load_renderer(model_path: Path | str, *, config: RendererConfig | None = None) -> TemplateRenderer:
    """Create a renderer for the model in the directory ``model_path``.

    Reads the tokenizer files, and further end tokens from ``generation_config.json`` if it exists.

    Raises:
        ModelError: there is no fast tokenizer or no usable chat template.
        ConfigError: the configuration names an unknown format.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_path))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"No tokenizer can be loaded from {model_path}: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(f"{model_path} has no fast tokenizer; save the model with its tokenizer.json.")
    stop_token_ids = _read_stop_ids(Path(model_path) / "generation_config.json")
    return create_renderer(tokenizer, config=config, stop_token_ids=stop_token_ids)


def create_renderer(
    tokenizer: PreTrainedTokenizerFast,
    *,
    config: RendererConfig | None = None,
    stop_token_ids: Sequence[int] = (),
    now: Callable[[], datetime] = datetime.now,
) -> TemplateRenderer:
    """Create a renderer for ``tokenizer``, whose backend is modified: truncation and padding are switched off.

    ``stop_token_ids`` are end tokens that neither the tokenizer nor the template defines. ``now`` is the clock for
    templates that print the date. Raises the errors of ``load_renderer``.
    """
    config = config or RendererConfig()
    vocabulary = _create_vocabulary(tokenizer)
    template = _create_template(tokenizer, config, now)
    tool_format, adaptation = _choose_tool_format(config, template)
    typesetter = Typesetter(template=template, adaptation=adaptation, vocabulary=vocabulary)
    end_of_turn = find_end_of_turn(typesetter, vocabulary)
    reasoning_format = choose_format(
        config.reasoning_format, REASONING_FORMATS, template=template.source, path="reasoning_format"
    )
    # Some families end an answer with tokens that the template does not show, for example after a call.
    more_ends = _find_special(vocabulary, reasoning_format.stops if reasoning_format else ())
    # The end of turn comes first, as ``Renderer.stop_token_ids`` promises.
    stops = _unique((end_of_turn, tokenizer.eos_token_id, *more_ends, *stop_token_ids))
    can_extend = end_of_turn is not None or bool(more_ends)
    return TemplateRenderer(
        vocabulary=vocabulary,
        typesetter=typesetter,
        stop_token_ids=stops,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
        probe=_create_probe(typesetter, vocabulary, stops) if can_extend else None,
    )


def _read_stop_ids(path: Path) -> tuple[int, ...]:
    """Return ``eos_token_id`` of a generation config, which holds one id, several, or none."""
    if not path.is_file():
        return ()
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    ids = found if isinstance(found, list) else [found]
    return tuple(token_id for token_id in ids if isinstance(token_id, int))


def _create_vocabulary(tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    special = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return Vocabulary.create(tokenizer.backend_tokenizer, special=special)


def _create_template(
    tokenizer: PreTrainedTokenizerFast, config: RendererConfig, now: Callable[[], datetime]
) -> ChatTemplate:
    source = config.chat_template or tokenizer.chat_template
    if not source:
        raise ModelError(
            "The model has no chat template; give one as chat_template, or use an instruction-tuned model."
        )
    named = tokenizer.special_tokens_map
    return ChatTemplate.create(source, variables={k: v for k, v in named.items() if isinstance(v, str)}, now=now)


def _choose_tool_format(config: RendererConfig, template: ChatTemplate) -> tuple[ToolFormat | None, Adaptation]:
    """Return the format for parsing answers, and the adaptation of the template.

    With ``auto``, an unrecognised template that does not support tools gets the first known format.
    """
    chosen = choose_format(config.tool_format, TOOL_FORMATS, template=template.source, path="tool_format")
    stand_in = chosen or next(iter(TOOL_FORMATS.values()))
    adaptation = probe_adaptation(template, stand_in)
    is_needed = config.tool_format == "auto" and not adaptation.has_tools
    return (stand_in if is_needed else chosen), adaptation


def _create_probe(typesetter: Typesetter, vocabulary: Vocabulary, stops: tuple[int, ...]) -> ParityProbe:
    # Longest first, because the alternatives of a regular expression are tried in order.
    texts = sorted((vocabulary.special[i] for i in stops if i in vocabulary.special), key=len, reverse=True)
    suffix = SuffixRenderer(typesetter=typesetter, closing=re.compile("|".join(map(re.escape, texts))))
    return ParityProbe(typesetter=typesetter, suffix=suffix, vocabulary=vocabulary, stop_token_ids=stops)


def _find_special(vocabulary: Vocabulary, texts: Sequence[str]) -> tuple[int, ...]:
    return tuple(token_id for token_id, text in vocabulary.special.items() if text in texts)


def _unique(token_ids: Iterable[object]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token_id for token_id in token_ids if isinstance(token_id, int)))
