"""Rendering: what a turn costs when only its suffix is rendered, against rendering the conversation anew every turn.

The conversation is an agent's: a system prompt, a question, and then a tool call and its result, turn for turn. The
tokenizer is small and real, the template a plain ChatML one, so that the figures are those of this library's code more
than of a model's vocabulary.
"""

from __future__ import annotations

from benchmarks.harness import Result, cpu_us_per_operation

from areal_actors.domain import ChatMessage, ForkReason, Ints, Tool, ToolCall, as_ints
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.rendering import TemplateRenderer, create_renderer

_NUM_TURNS = 128
_TOOL = Tool(
    name="multiply",
    description="Multiply two numbers.",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
)
_PROMPT = (
    ChatMessage(role="system", content="You are a helpful assistant. Use the tool; do not calculate yourself."),
    ChatMessage(role="user", content="What is the product of 12, 34 and 56? Answer in one short sentence."),
)
_CALL = ToolCall(id="call_00", name="multiply", arguments='{"a": 12, "b": 34}')
_ANSWER = ChatMessage(role="assistant", content="Let me multiply the first two numbers.", tool_calls=(_CALL,))
_RESULT = ChatMessage(role="tool", content="408", tool_call_id=_CALL.id)
_REMINDER = ChatMessage(role="user", content="Go on, and remember to answer in one short sentence.")
_HISTORY = (*_PROMPT, _ANSWER)
_NUM_REPEATS = 38  # of a result, so that 128 turns have 69 000 tokens
_NUM_SHARED_REPEATS = 160  # of instructions, so that they have 5 000 tokens
_LONG_RESULT = ChatMessage(role="tool", content="The product is 408. " * _NUM_REPEATS, tool_call_id=_CALL.id)


def _extend(renderer: TemplateRenderer, history: tuple[ChatMessage, ...], *new: ChatMessage) -> Ints:
    suffix = renderer.extend(history=history, new=new, is_closed=True, tools=(_TOOL,))
    assert not isinstance(suffix, ForkReason)
    return suffix


def _measure_growth(
    renderer: TemplateRenderer, result: ChatMessage, what: str, *, num_turns: int, rounds: int
) -> list[Result]:
    conversations = [(*_PROMPT, *(_ANSWER, result) * turn) for turn in range(1, num_turns + 1)]

    def render_anew() -> None:
        for messages in conversations:
            renderer.render(messages, tools=(_TOOL,))

    def extend() -> None:
        renderer.render(_PROMPT, tools=(_TOOL,))
        for messages in conversations:
            _extend(renderer, messages[:-1], result)

    anew = cpu_us_per_operation(render_anew, num_operations=num_turns, rounds=rounds)
    extended = cpu_us_per_operation(extend, num_operations=num_turns, rounds=rounds)
    num_tokens = len(renderer.render(conversations[-1], tools=(_TOOL,)))
    baseline = f"render anew, mean of {num_turns} turns{what}"
    return [
        Result(benchmark="rendering", name=baseline, value=anew, unit="µs/turn"),
        Result(
            benchmark="rendering",
            name=f"extend, mean of {num_turns} turns{what}",
            value=extended / anew,
            unit="ratio",
            gate=0.05,
            baseline=baseline,
            detail={"us_per_turn": extended, "num_tokens": num_tokens},
        ),
    ]


def _measure_turn(renderer: TemplateRenderer, *, num_operations: int) -> list[Result]:
    written = 'Let me see.\n<tool_call>\n{"name": "multiply", "arguments": {"a": 12, "b": 34}}\n</tool_call><|im_end|>'
    answer = renderer.vocabulary.encode("One short sentence. " * 40 + written)

    def extend() -> None:
        for _ in range(num_operations):
            _extend(renderer, _HISTORY, _RESULT, _REMINDER)

    def parse() -> None:
        for _ in range(num_operations):
            renderer.parse(answer, tools=(_TOOL,))

    def stream() -> None:
        for _ in range(num_operations // 10):
            parser = renderer.open_stream(tools=(_TOOL,))
            for token_id in answer:
                parser.feed((token_id,))
            parser.finish()

    num_streamed = num_operations // 10 * len(answer)
    figures = [
        ("extend by two messages", cpu_us_per_operation(extend, num_operations=num_operations), "µs", 150.0),
        ("parse an answer", cpu_us_per_operation(parse, num_operations=num_operations), "µs", None),
        ("stream an answer", cpu_us_per_operation(stream, num_operations=num_streamed), "µs/token", None),
    ]
    return [
        Result(benchmark="rendering", name=name, value=value, unit=unit, gate=gate, detail={"num_tokens": len(answer)})
        for name, value, unit, gate in figures
    ]


def _measure_shared(renderer: TemplateRenderer, *, num_operations: int) -> list[Result]:
    """The first turn of a conversation whose instructions were seen before, and of one with new instructions."""
    instructions = "You are an agent. Read the files, then answer in one short sentence. " * _NUM_SHARED_REPEATS
    names = (f"{number} " for number in range(2**31))

    def prompt(start: str) -> tuple[ChatMessage, ...]:
        question = ChatMessage(role="user", content=f"What is question {next(names)}?")
        return ChatMessage(role="system", content=start + instructions), question

    def render_anew() -> None:
        for _ in range(num_operations):
            as_ints(renderer.vocabulary.encode(renderer.formatter.format(prompt(next(names)), options={})))

    def render_new() -> None:
        for _ in range(num_operations):
            renderer.render(prompt(next(names)))

    def render_shared() -> None:
        for _ in range(num_operations):
            renderer.render(prompt(""))

    num_tokens = len(renderer.render(prompt("")))
    anew, new, shared = (
        cpu_us_per_operation(each, num_operations=num_operations, rounds=7)
        for each in (render_anew, render_new, render_shared)
    )
    baseline, detail = "tokenise instructions anew", {"num_tokens": num_tokens}
    figures = (("new instructions", new, 1.1), ("shared instructions", shared, 0.2))
    return [
        Result(benchmark="rendering", name=baseline, value=anew, unit="µs", detail=detail),
        *(
            Result(
                benchmark="rendering",
                name=f"first turn with {what}",
                value=value / anew,
                unit="ratio",
                gate=gate,
                baseline=baseline,
                detail=detail | {"us": value},
            )
            for what, value, gate in figures
        ),
    ]


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the signature of every benchmark
    """CPU time of rendering, extending and reading one turn, and the ratio that incremental rendering is for."""
    renderer = create_renderer(create_tiny_tokenizer())
    _extend(renderer, _HISTORY, _RESULT, _REMINDER)
    turn = _measure_turn(renderer, num_operations=100 if quick else 1000)
    growth = _measure_growth(renderer, _RESULT, "", num_turns=_NUM_TURNS, rounds=1 if quick else 3)
    num_turns = _NUM_TURNS // 4 if quick else _NUM_TURNS
    long = _measure_growth(renderer, _LONG_RESULT, " of 540 tokens", num_turns=num_turns, rounds=1)
    shared = _measure_shared(renderer, num_operations=5 if quick else 20)
    return [*turn, *growth, *long, *shared]


if __name__ == "__main__":
    for result in run(quick=False):
        print(f"{result.name:60} {result.value:12.4f} {result.unit} {result.detail}")
