"""Chat templates are sandboxed Jinja in the dialect that models come with."""

from __future__ import annotations

import pytest

from areal_actors.errors import ModelError, RenderError
from areal_actors.rendering.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "é<"}]


def render(source, *, tools=(), options=None, **more):
    """The text of one message."""
    template = ChatTemplate.create(source, variables={"bos_token": "<s>"}, **more)
    return template.render(MESSAGES, tools=tools, options=options or {})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>é<"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "é<"}]'),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{% for m in [1, 2] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{{ tools is none }}{{ add_generation_prompt }}", "TrueTrue"),
        ("{%- set ns = namespace(n=1) %}{%- set ns.n = 2 %}{{ ns.n }}", "2"),
    ],
)
def test_template_dialect(source, text):
    """Filters, tags and variables that templates rely on."""
    assert text == render(source)


def test_model_may_have_a_template_for_tools():
    """It is used when there are tools."""
    named = {"default": "plain", "tool_use": "{{ tools | length }} tools", "rag": "{{"}

    assert ("plain", "1 tools") == (render(named), render(named, tools=[{}]))


@pytest.mark.parametrize(
    ("source", "complaint"), [("{% if %}", r"not valid Jinja \(line 1\)"), ({"rag": ""}, "none called default")]
)
def test_templates_that_cannot_be_used(source, complaint):
    """Found when the model is loaded, not at the first request."""
    with pytest.raises(ModelError, match=complaint):
        render(source)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ raise_exception('not today') }}", r"refuses these 1 messages \(roles user\): not today\."),
        ("{{ messages[3].content }}", "refuses"),
        ("{{ 1 + messages }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
    ],
)
def test_any_error_of_a_template_is_a_refusal(source, complaint):
    """Also attempts to leave the sandbox."""
    with pytest.raises(RenderError, match=complaint):
        render(source)
