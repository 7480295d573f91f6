"""A Hugging Face chat template as a function from plain messages to text.

Templates are Jinja programs that come with a model. They are compiled once and run in Jinja's sandbox, with the extra
tags, filters and functions that such templates expect. This module does not depend on tokens or domain values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from attrs import frozen
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from areal_actors.errors import ModelError, RenderError

__all__ = ["ChatTemplate", "PlainMessage"]

PlainMessage = dict[str, Any]
"""A message as templates read it: ``role``, ``content``, ``tool_calls``, …"""

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class _GenerationTag(Extension):
    """Support for ``{% generation %}``, which marks the assistant's text for loss masks. Only its body is rendered.

    Loss masks here come from sampling, so that the mark is not needed.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    *,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson`` without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _create_environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    # The options with which transformers renders chat templates; a template depends on them for its white space.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _compile(environment: ImmutableSandboxedEnvironment, source: str) -> jinja2.Template:
    template = environment.from_string(source)
    template.globals = dict(template.globals)  # copied at every rendering, which is slow for Jinja's chain of dicts
    return template


@frozen(kw_only=True)
class ChatTemplate:
    """A compiled template, or two if a model has a separate one for conversations with tools."""

    source: str
    """The text of the template (of both, joined), by which families are recognised."""
    plain: jinja2.Template
    with_tools: jinja2.Template
    variables: Mapping[str, str]
    """The tokenizer's named special tokens (``bos_token``, ``eos_token``, …), which templates refer to."""

    @staticmethod
    def create(
        source: str | Mapping[str, str],
        *,
        variables: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> ChatTemplate:
        """Compile ``source``: a template, or several by name, of which ``default`` and ``tool_use`` are used.

        ``now`` is the clock for templates that print the date.

        Raises:
            ModelError: a template is not valid Jinja, or there is no default template.
        """
        named = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in named:
            raise ModelError(
                f"The model has chat templates {sorted(named)} and none called default; name one in the configuration."
            )
        environment = _create_environment(now)
        try:
            plain = _compile(environment, named["default"])
            with_tools = _compile(environment, named["tool_use"]) if "tool_use" in named else plain
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"The chat template is not valid Jinja (line {error.lineno}): {error.message}") from error
        text = "\n".join(named[name] for name in ("default", "tool_use") if name in named)
        return ChatTemplate(source=text, plain=plain, with_tools=with_tools, variables=variables)

    def render(
        self,
        messages: Sequence[PlainMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any],
        has_generation_prompt: bool = True,
    ) -> str:
        """Return the text of the conversation. ``options`` are further variables of the template.

        Raises:
            RenderError: the template refuses the conversation; the message contains the template's own.
        """
        if clash := _RESERVED & options.keys():
            raise RenderError(
                f"Template options may not be called {', '.join(sorted(clash))}: the renderer sets these itself."
            )
        template = self.with_tools if tools else self.plain
        try:
            return template.render(
                {
                    **self.variables,
                    **options,
                    "messages": messages,
                    # Templates commonly test for ``none``, so that an empty list would count as tools.
                    "tools": list(tools) or None,
                    "documents": None,
                    "add_generation_prompt": has_generation_prompt,
                }
            )
        except Exception as error:  # a template is a third party's program: any error means that it refuses
            raise RenderError(_refusal(messages, error)) from error


def _refusal(messages: Sequence[PlainMessage], error: Exception) -> str:
    shown = [str(message["role"]) for message in messages[:8]]
    roles = ", ".join(shown) + (", …" if len(messages) > len(shown) else "")
    what = f"The model's chat template refuses these {len(messages)} messages (roles {roles})"
    return f"{what}: {error}. Change their roles or order."
