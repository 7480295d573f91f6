"""Compare prompts and the reading of answers with the vendors' own templates and with the package ``renderers``.

The templates are those that llama.cpp tests with, out of the source archive of ``llama-cpp-python``. For each family:

* prompts equal those of transformers, token by token, for histories that the template can express;
* they equal those of ``renderers`` (hand-written modules, no templates), where it has the family;
* answers that the template writes are read back as the message they were written from, whole and token by token;
* where the next messages are rendered alone, the result equals the rendering of the whole conversation;
* of damaged answers (cut anywhere), ``renderers`` reads the same text, reasoning and calls.

Run it by ``nox -s formats``; ``python -m tools.formats TEMPLATES [FAMILY …]`` with the directory of the templates.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from transformers import PreTrainedTokenizerFast

from areal_actors.domain import ChatMessage, ForkReason, Tool, ToolCall
from areal_actors.errors import ArealError
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.rendering import Renderer, create_renderer
from areal_actors.rendering.parsers import join_deltas

NUM_ANSWERS = 500
"""Generated answers of each family, each of which is also cut at a random place."""


@frozen(kw_only=True)
class Vendor:
    """A template of a vendor, the tokens that end an answer, and the name of the family in ``renderers``."""

    template: str
    ends: tuple[str, ...]
    other: str | None = None
    start: str = "<s>"
    options: Mapping[str, Any] = {}
    """Options of the template under which answers may contain reasoning."""
    known: Mapping[str, str] = {}
    """Differences that were judged: the check and the reason."""


_chatml = partial(Vendor, ends=("<|im_end|>",))
_llama = partial(Vendor, ends=("<|eot_id|>", "<|eom_id|>"), start="<|begin_of_text|>")
_deepseek = partial(Vendor, ends=("<｜end▁of▁sentence｜>",), start="<｜begin▁of▁sentence｜>")
_cohere = partial(Vendor, ends=("<|END_OF_TURN_TOKEN|>",), start="<BOS_TOKEN>")
_glm = partial(Vendor, ends=("<|user|>", "<|observation|>"))
_NO_TOOLS = {"vendor's prompts": "the template has no tools, calls or results: they are written into its messages"}
_PYTHON = {"whole answers of renderers": "the template writes True, which renderers does not read as a boolean"}
_REVISION = {"prompts of renderers": "renderers has another revision of the template"}
_JUDGED = {"cut answers of renderers": "renderers drops a call whose last tag is missing"}
"""Differences of all families."""

VENDORS: Mapping[str, Vendor] = {
    "qwen2.5": _chatml(template="Qwen-Qwen2.5-7B-Instruct"),
    "qwen3": _chatml(template="Qwen-Qwen3-0.6B", other="Qwen3RendererConfig"),
    "qwen3-coder": _chatml(template="Qwen3-Coder"),
    "qwen3.5": _chatml(template="Qwen3.5-4B", other="Qwen35RendererConfig", known=_PYTHON),
    "smollm3": _chatml(template="HuggingFaceTB-SmolLM3-3B", known=_NO_TOOLS),
    "lfm2.5": _chatml(
        template="LFM2.5-8B-A1B", known={"read back": "the template writes quotes in text without escapes"}
    ),
    "nemotron-3": _chatml(
        template="NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", other="Nemotron3RendererConfig", known=_PYTHON
    ),
    "kimi-k2": _chatml(template="moonshotai-Kimi-K2", other="KimiK2RendererConfig", known=_REVISION),
    "step-3.5": _chatml(template="StepFun3.5-Flash"),
    "glm-4.6": _glm(template="GLM-4.6"),
    "glm-5": _glm(template="GLM-4.7-Flash", other="GLM5RendererConfig"),
    "minimax-m2": Vendor(template="MiniMax-M2", ends=("[e~[",), other="MiniMaxM2RendererConfig", known=_REVISION),
    "deepseek-v3.1": _deepseek(template="deepseek-ai-DeepSeek-V3.1", options={"thinking": True}, known=_NO_TOOLS),
    "deepseek-v3.2": _deepseek(template="deepseek-ai-DeepSeek-V3.2", options={"thinking": True}),
    "deepseek-v4": _deepseek(
        template="deepseek-ai-DeepSeek-V4-Flash-0731",
        other="DeepSeekV4RendererConfig",
        options={"thinking": True, "enable_thinking": True},
        known=_REVISION,
    ),
    "llama-3.1": _llama(template="meta-llama-Llama-3.1-8B-Instruct"),
    "llama-3.2": _llama(
        template="meta-llama-Llama-3.2-3B-Instruct",
        other="Llama3RendererConfig",
        options={"date_string": "26 Jul 2024"},
    ),
    # The module of ``renderers`` downloads its vocabulary.
    "gpt-oss": Vendor(
        template="openai-gpt-oss-120b",
        ends=("<|return|>", "<|call|>"),
        known={
            "vendor's prompts": "the template shows the first of several calls; they are shown one by one",
            "read back": "the template takes one text beside a call: content joins the reasoning",
        },
    ),
    "gemma-2": Vendor(template="google-gemma-2-2b-it", ends=("<end_of_turn>",), start="<bos>"),
    "gemma-4": Vendor(
        template="google-gemma-4-31B-it",
        ends=("<turn|>", "<|tool_response>"),
        start="<bos>",
        other="Gemma4RendererConfig",
        options={"enable_thinking": True},
        known=_REVISION,
    ),
    "mistral-nemo": Vendor(
        template="mistralai-Mistral-Nemo-Instruct-2407",
        ends=("</s>",),
        known={
            "vendor's prompts": "the template moves the system prompt to the last question; it stays with the first"
        },
    ),
    "mistral-small-3.2": Vendor(template="Mistral-Small-3.2-24B-Instruct-2506", ends=("</s>",)),
    "ministral-3": Vendor(template="mistralai-Ministral-3-14B-Reasoning-2512", ends=("</s>",)),
    "command-r7b": _cohere(template="CohereForAI-c4ai-command-r7b-12-2024-tool_use"),
    "command-a": _cohere(template="Cohere2MoE"),
    "granite-3.3": Vendor(
        template="ibm-granite-granite-3.3-2B-Instruct",
        ends=("<|end_of_text|>",),
        known={"vendor's prompts": "the template has no calls: they are written into its messages"},
    ),
    "granite-4": Vendor(template="ibm-granite-granite-4.1", ends=("<|end_of_text|>",)),
    "seed-oss": Vendor(template="ByteDance-Seed-OSS", ends=("<seed:eos>",), start="<seed:bos>"),
    "phi-3.5": Vendor(template="microsoft-Phi-3.5-mini-instruct", ends=("<|end|>",), known=_NO_TOOLS),
}

_SPECIAL = re.compile(
    r"<\|[\w/ .:-]{1,40}\|?>|<[\w:/]{1,30}\|>|<\|\"\|>|<｜[^｜<>]{1,40}｜>|\[/?[A-Z_]{2,20}\]|<(?:start|end)_of_turn>"
    r"|\]~!?b\[|\[e~\[|\]~b\]|<seed:(?:bos|eos)>|｜DSML｜"
)
"""Special tokens in the text of a template: the tokenizers themselves are not needed to compare texts."""

CALC = Tool(
    name="calc",
    description="Computes.",
    parameters={
        "type": "object",
        "properties": {
            "expr": {"type": "string", "description": "An expression."},
            "digits": {"type": "integer"},
            "exact": {"type": "boolean"},
            "names": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["expr"],
    },
)
NOW = Tool(name="get_now", description="Tells the time.", parameters={"type": "object", "properties": {}})
TOOLS = (CALC, NOW)


def create_tokenizer(vendor: Vendor, source: str, more: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return the tokenizer of ``tiny`` with the family's special tokens and template."""
    tokenizer = create_tiny_tokenizer(template=source)
    special = dict.fromkeys([*vendor.ends, *_SPECIAL.findall(source), *more])
    named: dict[str, Any] = {
        "bos_token": vendor.start,
        "eos_token": vendor.ends[0],
        "additional_special_tokens": [*special],
    }
    tokenizer.add_special_tokens(named)
    tokenizer.unk_token = None
    return tokenizer


def _user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def _call(index: int, name: str = "calc", **arguments: object) -> ToolCall:
    return ToolCall(id=f"functions.{name}:{index}", name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def histories() -> Iterator[tuple[str, Sequence[ChatMessage], Sequence[Tool]]]:
    """Yield histories by name, with the tools that are offered."""
    system = ChatMessage(role="system", content="Be brief.")
    hello = ChatMessage(role="assistant", content="Hello there.")
    asked = ChatMessage(role="assistant", tool_calls=(_call(0, expr="1+1", digits=3, exact=True, names=["a", "b"]),))
    result = ChatMessage(role="tool", content="2", tool_call_id="functions.calc:0", name="calc")
    both = ChatMessage(role="assistant", content="", tool_calls=(_call(0, expr="1"), _call(1, expr="é")))
    second = ChatMessage(role="tool", content="two\nlines", tool_call_id="functions.calc:1", name="calc")
    yield "question", [_user("What?")], ()
    yield "system", [system, _user("What?")], ()
    yield "turns", [system, _user("Hi."), hello, _user("And now?")], ()
    yield "tools", [system, _user("What is 1+1?")], TOOLS
    yield "result", [_user("What is 1+1?"), asked, result], TOOLS
    yield "parallel results", [system, _user("Both?"), both, result, second], TOOLS
    yield "after results", [_user("1+1?"), asked, result, hello, _user("Again?")], TOOLS
    thinks = evolve(asked, reasoning="I add.")
    yield "reasoning and result", [_user("1+1?"), thinks, result], TOOLS
    yield "reasoning twice", [_user("1+1?"), thinks, result, evolve(thinks, reasoning="Again."), result], TOOLS
    yield "reasoning and question", [_user("Hi."), evolve(hello, reasoning="I greet."), _user("And now?")], ()


_THOUGHT = "I think of"
_WORDS = ("a", "plain words", "é😀", "x < y", "line\nbreak", '{"a": 1}', "it's", "<b>", "12", "true", "- item")


def draw_answer(draw: random.Random, *, has_reasoning: bool) -> ChatMessage:
    """Return an answer with text, reasoning and calls at random."""

    def text() -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(1, 4)))

    calls: list[ToolCall] = []
    for index in range(draw.choice((0, 0, 1, 1, 2))):
        arguments: dict[str, object] = {"expr": text()}
        arguments |= {"digits": draw.randint(-5, 99)} if draw.random() < 0.5 else {}
        arguments |= {"exact": draw.random() < 0.5} if draw.random() < 0.3 else {}
        arguments |= {"names": [text() for _ in range(draw.randint(0, 2))]} if draw.random() < 0.3 else {}
        calls.append(_call(index, **arguments) if draw.random() < 0.8 else _call(index, "get_now"))
    content = text() if not calls or draw.random() < 0.4 else None
    reasoning = f"{_THOUGHT} {text()}" if has_reasoning and draw.random() < 0.7 else None
    return ChatMessage(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(calls))


def summarise(message: ChatMessage) -> tuple[str, str, list[tuple[str, object]]]:
    """Return text, reasoning and calls, without white space around them and without ids."""
    calls: list[tuple[str, object]] = []
    for call in message.tool_calls:
        try:
            calls.append((call.name, json.loads(call.arguments)))
        except ValueError:
            calls.append((call.name, call.arguments))
    return (message.content or "").strip(), (message.reasoning or "").strip(), calls


class Checks:
    """The counts of one family: what was compared, what agreed, and an example of each difference."""

    def __init__(self) -> None:
        self.agreed: Counter[str] = Counter()
        self.total: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, check: str, got: object, wanted: object, about: str) -> None:
        """Count a comparison."""
        self.total[check] += 1
        self.agreed[check] += got == wanted
        if got != wanted:
            self.examples.setdefault(check, f"{about}\n      ours:   {got!r}\n      theirs: {wanted!r}")


def check_prompts(
    checks: Checks, renderer: Renderer, tokenizer: PreTrainedTokenizerFast, vendor: Vendor, other: Any
) -> None:
    """Compare the prompts of ``histories`` with those of transformers and of ``renderers``."""
    for name, messages, tools in histories():
        plain = [_to_openai(message) for message in messages]
        offered = [{"type": "function", "function": _to_function(tool)} for tool in tools]
        try:
            ours = tokenizer.decode(list(renderer.render(messages, tools=tools, template_kwargs=vendor.options)))
        except ArealError as error:
            ours = f"refused: {error}"
        try:
            template = tokenizer.apply_chat_template(
                plain, tools=offered or None, tokenize=False, add_generation_prompt=True, **vendor.options
            )
        except Exception:  # noqa: BLE001 - a template that refuses a history says so in any way
            template = None
        if template is not None:
            checks.add("vendor's prompts", ours, template, name)
        if other is not None:
            # Its modules print a tool as it is given, with OpenAI's wrapper or without.
            try:
                theirs = [
                    tokenizer.decode(other.render_ids(plain, tools=form or None, add_generation_prompt=True))
                    for form in (offered, [_to_function(tool) for tool in tools])
                ]
            except ValueError:  # the module refuses the history
                continue
            checks.add("prompts of renderers", ours, ours if ours in theirs else theirs[0], name)


def check_extension(checks: Checks, renderer: Renderer, vendor: Vendor) -> None:
    """Continue the histories after each of their answers, and compare with rendering them as a whole."""
    options, decode = vendor.options, renderer.vocabulary.decode
    for name, messages, tools in histories():
        for place, message in enumerate(messages):
            if message.role != "assistant" or place + 1 == len(messages):
                continue
            before, after = messages[:place], list(messages[place + 1 :])
            new = after[: next((n for n, each in enumerate(after) if each.role == "assistant"), len(after))]
            given: dict[str, Any] = {"tools": tools, "template_kwargs": options}
            try:
                answer = renderer.render_answer(before, message, **given)
                read = renderer.parse(answer, **given, call_ids=iter([c.id for c in message.tool_calls]).__next__)
                history = [*before, read]
                whole = list(renderer.render([*history, *new], **given))
            except ArealError:
                checks.total["not written by the template"] += 1
                continue
            tail = renderer.extend(history=history, new=new, end=int(answer[-1]), **given)
            if isinstance(tail, ForkReason):
                checks.total["rendered again"] += 1
                continue
            continued = [*renderer.render(before, **given), *answer, *tail]
            checks.add("continued", decode(continued), decode(whole), name)


def check_answers(checks: Checks, renderer: Renderer, vendor: Vendor, other: Any) -> None:
    """Read generated answers back, as they are and cut."""
    draw = random.Random(7)
    question, options = [_user("What is 1+1?")], vendor.options
    prompt = list(renderer.render(question, tools=TOOLS, template_kwargs=options))
    for _ in range(NUM_ANSWERS):
        answer = draw_answer(draw, has_reasoning=renderer.has_reasoning)
        try:
            ids = list(renderer.render_answer(question, answer, tools=TOOLS, template_kwargs=options))
        except ArealError:
            checks.total["not written by the template"] += 1
            continue
        written = renderer.vocabulary.decode(ids)
        read = renderer.parse(ids, tools=TOOLS, template_kwargs=options)
        if answer.reasoning and _THOUGHT not in written:
            checks.total["reasoning dropped by the template"] += 1
            continue
        checks.add("read back", summarise(read), summarise(answer), repr(written))
        cut = ids[: draw.randint(0, len(ids))]
        for tokens in (ids, cut):
            whole = renderer.parse(tokens, tools=TOOLS, template_kwargs=options)
            stream = renderer.open_stream(tools=TOOLS, template_kwargs=options)
            streamed = join_deltas([*(d for each in tokens for d in stream.feed([each])), *stream.finish()])
            checks.add("streamed as whole", summarise(streamed), summarise(whole), repr(tokens))
            if other is not None:
                parsed = other.parse_response(tokens, tools=[_to_function(t) for t in TOOLS], prompt_ids=prompt)
                theirs = _from_renderers(parsed)
                about = repr(renderer.vocabulary.decode(tokens))
                if tokens is ids:
                    checks.add("whole answers of renderers", summarise(whole), theirs, about)
                else:
                    # What is cut in a call is content or an incomplete call here, and dropped there.
                    checks.add("cut answers of renderers", _complete(summarise(whole)), _complete(theirs), about)


def _to_openai(message: ChatMessage) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in message.tool_calls
        ]
    if message.reasoning is not None:
        plain["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        plain |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return plain


def _to_function(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}


def _complete(read: tuple[str, str, list[tuple[str, object]]]) -> tuple[str, list[tuple[str, object]]]:
    """Return the reasoning and the complete calls."""
    return read[1], [call for call in read[2] if isinstance(call[1], dict)]


def _from_renderers(parsed: Any) -> tuple[str, str, list[tuple[str, object]]]:
    calls = [(call.name, call.arguments) for call in parsed.tool_calls if str(call.status) == "ok"]
    return (parsed.content or "").strip(), (parsed.reasoning_content or "").strip(), calls


def create_other(vendor: Vendor, source: str) -> tuple[PreTrainedTokenizerFast, Any]:
    """Return the family's module of ``renderers``, and a tokenizer with all special tokens that it wants."""
    import renderers  # type: ignore[import-untyped]
    from renderers import configs

    config = getattr(configs, str(vendor.other))
    known = {key: value for key, value in vendor.options.items() if key in config.model_fields}
    more: list[str] = []
    while True:
        tokenizer = create_tokenizer(vendor, source, more)
        try:
            return tokenizer, renderers.create_renderer(tokenizer, config(**known))
        except (AssertionError, ValueError) as error:
            missing = re.search(r"(?:Special token|one token for) '(.+?)'", str(error))
            if missing is None or missing[1] in more:
                raise
            more.append(missing[1])


def check_family(vendor: Vendor, source: str) -> Checks:
    """Run all checks of one family."""
    tokenizer, other = create_tokenizer(vendor, source), None
    if vendor.other is not None:
        tokenizer, other = create_other(vendor, source)
    ids = tokenizer.get_vocab()
    renderer = create_renderer(tokenizer, stop_token_ids=[ids[end] for end in vendor.ends])
    checks = Checks()
    check_prompts(checks, renderer, tokenizer, vendor, other)
    check_extension(checks, renderer, vendor)
    check_answers(checks, renderer, vendor, other)
    return checks


_HEAD = """\
# Chat formats

Prompts and answers of each family, compared with the vendor's own chat template (out of llama.cpp's tests) and with the
package `renderers`, by `nox -s formats`. *Read back*: generated answers as the template writes them. *Continued*:
conversations in which only the next messages were rendered; *rendered again* are those that the template changes
afterwards. An example and the reason of each difference is printed.

"""


def main(directory: Path, page: Path | None, names: Sequence[str]) -> int:
    """Write the table, and print an example of each difference; return 1 if one of them was not judged."""
    sources = {path.stem: path for path in sorted(directory.rglob("*.jinja"))}
    columns = (
        "vendor's prompts",
        "prompts of renderers",
        "read back",
        "streamed as whole",
        "continued",
        "rendered again",
        "whole answers of renderers",
        "cut answers of renderers",
    )
    rows = [f"| family | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    told: list[str] = []
    is_new = False
    for name, vendor in VENDORS.items():
        if names and name not in names:
            continue
        checks = check_family(vendor, sources[vendor.template].read_text(encoding="utf-8"))
        cells = [f"{checks.agreed[c]}/{checks.total[c]}" if checks.total[c] else "-" for c in columns]
        cells[5] = str(checks.total["rendered again"])
        rows.append(f"| {name} | {' | '.join(cells)} |")
        known = _JUDGED | dict(vendor.known)
        for check, example in checks.examples.items():
            is_new |= check not in known
            told.append(f"{name}, {check}: {known.get(check, 'not judged')}\n   {example}")
    print("\n".join([*rows, "", *told]))
    if page is not None:
        reasons = [f"* {line.splitlines()[0]}" for line in told]
        page.write_text(_HEAD + "\n".join([*rows, "", *reasons]) + "\n", encoding="utf-8")
    return int(is_new)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("templates", type=Path)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    sys.exit(main(given.templates, given.page, given.families))
