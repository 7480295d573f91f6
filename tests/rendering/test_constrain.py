"""What an answer must match: calls and forms, in the words of the model's own format."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from areal_actors.domain import Exactly, Grammar, InOrder, JsonText, OneOf, Repeated, Tool, ToolChoice
from areal_actors.errors import UnsupportedParameter
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.rendering import RendererConfig, create_renderer
from areal_actors.rendering.parsers import TOOL_FORMATS

F = Tool(name="f", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})
G = Tool(name="g", is_strict=True)
FORM = JsonText(schema={"type": "object"})


@pytest.fixture(scope="module")
def renderer():
    """A model that knows no tools and does not think, and so speaks the first format."""
    return create_renderer(create_tiny_tokenizer())


def _leaves(grammar: Grammar) -> Iterator[Grammar]:
    match grammar:
        case InOrder(parts=parts) | OneOf(parts=parts):
            for part in parts:
                yield from _leaves(part)
        case Repeated(part=part):
            yield from _leaves(part)
        case leaf:
            yield leaf


def _names(grammar: Grammar | None) -> str:
    assert grammar is not None
    return "".join(leaf.text for leaf in _leaves(grammar) if isinstance(leaf, Exactly))


def test_free_answer_has_no_grammar(renderer):
    """No grammar, no mask: neither tools nor their absence constrain anything by themselves."""
    assert renderer.constrain() is None
    assert renderer.constrain(tools=[F, G]) is None
    assert renderer.constrain(tools=[F, G], tool_choice=ToolChoice.NONE) is None


def test_required_call_is_one_of_the_tools(renderer):
    """``required`` takes any of them, a name that one; one call if calls may not be parallel."""
    required = renderer.constrain(tools=[F, G], tool_choice=ToolChoice.REQUIRED)
    named = renderer.constrain(tools=[F, G], tool_choice="g", parallel_tool_calls=False)

    assert '"f"' in _names(required)
    assert '"g"' in _names(required)
    assert '"f"' not in _names(named)
    assert isinstance(required, Repeated)
    assert required.at_most is None
    assert isinstance(named, Repeated)
    assert named.at_most == 1


def test_response_format_allows_calls_or_matching_text(renderer):
    """With tools that may be called; what is demanded comes first, and what may not be called is left out."""
    either = renderer.constrain(tools=[F], response_format=FORM)

    assert either == OneOf(parts=(renderer.constrain(tools=[F], tool_choice=ToolChoice.REQUIRED), FORM))
    assert renderer.constrain(response_format=FORM) == FORM
    assert renderer.constrain(tools=[F], tool_choice=ToolChoice.NONE, response_format=FORM) == FORM
    assert FORM not in _leaves(renderer.constrain(tools=[F], tool_choice="f", response_format=FORM))


def test_model_without_tool_format_cannot_be_required_to_call():
    """Neither by name, nor as one of two ways to answer."""
    mute = create_renderer(create_tiny_tokenizer(), config=RendererConfig(tool_format="none"))

    for options in ({"tool_choice": "f"}, {"tool_choice": ToolChoice.REQUIRED}, {"response_format": FORM}):
        with pytest.raises(UnsupportedParameter, match="no grammar"):
            mute.constrain(tools=[F], **options)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_every_format_passes_on_how_strict_a_tool_is(name):
    """Only a strict tool has calls refused for a keyword that no engine can hold."""
    for tool in (F, G):
        form = TOOL_FORMATS[name].constrain([tool], is_parallel=True)
        schemas = [leaf for leaf in _leaves(form) if isinstance(leaf, JsonText)] if form else []

        assert {leaf.is_strict for leaf in schemas} <= {tool.is_strict}
