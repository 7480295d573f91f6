"""What the model says to the clients: a function of the prompt alone, with everything that clients stumble over.

A question carries a label such as ``[c7]``, which comes back in every answer, in every argument of a tool and so in
every result: whose turn a request continues can be read off its prompt, however the proxy links it.

====================  ==========================================================================================
a question that says  is answered by
====================  ==========================================================================================
``weather``           a call, where tools are offered: text before it, odd spacing and escapes in its arguments
``both``              two calls in one answer
``ponder``            thinking first
``report``            a JSON object, or the arguments of the only tool
``recite``            a text that the engine never finishes (see ``staging``)
anything else         the question itself, after two line breaks, with characters of many bytes
====================  ==========================================================================================

Results of tools are repeated. A tool called ``final_answer`` is how some agents want every answer.
"""

from __future__ import annotations

import json
import re

from attrs import frozen

__all__ = ["label_of", "speak"]

_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_LABEL = re.compile(r"\[(\w+)\]")
_OBSERVATION = "Observation:"
_NEW_TASK = "New task:\n"  # smolagents sets it before a question, and an observation of the last one before that
_REPORT = '{"city":  "Z\\u00fcrich [%s]", "degrees": 21}'


@frozen(kw_only=True)
class _Scene:
    """A prompt, read: the last question, the results that came since, and the tools on offer."""

    question: str
    results: tuple[str, ...]
    tools: tuple[str, ...]

    @property
    def label(self) -> str:
        return label_of(self.question) or "none"


def label_of(text: str) -> str | None:
    """The last label in ``text``."""
    labels = _LABEL.findall(text)
    return labels[-1] if labels else None


def speak(prompt: str) -> str:
    """The answer to a rendered prompt."""
    scene = _read(prompt)
    if scene.results:
        return _say(scene, f"It says: {' and '.join(scene.results)}.")
    thought = f"<think>\nHm [{scene.label}], ünd 漢.\n</think>\n\n" if "ponder" in scene.question else ""
    return thought + _answer(scene)


def _answer(scene: _Scene) -> str:
    if "recite" in scene.question:
        return "la " * 400
    if "report" in scene.question:
        return _report(scene)
    if "weather" in scene.question and scene.tools:
        return "\n\nLet me check. \n" + _calls(scene)
    return _say(scene, f"\n\nYou said: {scene.question} — ünïcödé 漢 🙂 ")


def _say(scene: _Scene, text: str) -> str:
    if "final_answer" in scene.tools:
        return _call("final_answer", json.dumps({"answer": text}))
    return text


def _calls(scene: _Scene) -> str:
    place = f'"city":  "Z\\u00fcrich [{scene.label}]"'
    calls = [_call("weather", f'{{{place}, "days": 2.0}}')]
    if "both" in scene.question:
        calls.append(_call("population", f"{{{place}}}"))
    return "\n".join(calls)


def _report(scene: _Scene) -> str:
    report = _REPORT % scene.label
    return _call(scene.tools[0], report) if scene.tools else report


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _read(prompt: str) -> _Scene:
    turns = [(match[1], match[2].strip().rpartition(_NEW_TASK)[2]) for match in _TURN.finditer(prompt)]
    while turns and turns[-1][0] == "assistant":  # the header that asks for the answer
        turns.pop()
    questions = [text for role, text in turns if role == "user" and not _results(text)]
    results = _results(turns[-1][1]) if turns else ()
    return _Scene(question=questions[-1] if questions else "", results=results, tools=_tools(prompt))


def _results(text: str) -> tuple[str, ...]:
    if text.startswith(_OBSERVATION):
        return (text.removeprefix(_OBSERVATION).strip(),)
    return tuple(_RESULT.findall(text)) if text.startswith("<tool_response>") else ()


def _tools(prompt: str) -> tuple[str, ...]:
    """The names of the tools that the template lists, one JSON object a line."""
    block = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    tools = [json.loads(line) for line in block[1].splitlines() if line.startswith("{")] if block else []
    return tuple(tool.get("function", tool)["name"] for tool in tools)
