"""Problems of function calling in the format of the Berkeley Function Calling Leaderboard (BFCL), and their check.

A file has one problem a line: messages and functions. The answers are in a file of the same name in the directory
``possible_answer`` next to it, with the values that each argument may have. Problems whose id says ``irrelevance`` have
none: they are solved by an answer without calls. ``relevance`` asks for any call.

``dataset: {bfcl: FILE}`` names a file, and ``areal_actors_environments.bfcl:FunctionCaller`` is the agent for it.
``find_fault`` decides as BFCL's own checker of syntax trees does for Python, on the calls of an answer. The format and
the rules are those of https://github.com/ShishirPatil/gorilla (Patil et al., 2025).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from attrs import frozen

from areal_actors.datasets import DataPath, DatasetConfig, Rows, plain_row, read_json_lines
from areal_actors.errors import DatasetError

_TYPES = {
    "any": "string",
    "bool": "boolean",
    "dict": "object",
    "double": "number",
    "float": "number",
    "list": "array",
    "tuple": "array",
}
"""BFCL's names of types that JSON Schema calls otherwise."""
_PYTHON: Mapping[str, type] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "number": float,
    "object": dict,
    "string": str,
}
_OMITTED = ""
"""Among the values of an argument: it may be left out."""
_IGNORED = re.compile(r"[ ,./\-_*^]")
_OTHER_LANGUAGES = ("java",)  # and javascript, whose arguments are source code as well
_UNSUPPORTED = ("multi_turn", "memory", "web_search", "format_sensitivity")


@frozen
class FunctionCall:
    """A call that an answer makes. ``arguments`` are ``None`` if they are not a JSON object."""

    name: str
    arguments: Mapping[str, Any] | None


@frozen(kw_only=True)
class BfclFile:
    """A file of the Berkeley Function Calling Leaderboard; its answers are in possible_answer/ next to it."""

    short_form: ClassVar[str] = "path"

    path: DataPath

    @property
    def source(self) -> str:
        """The file."""
        return str(self.path)

    def load(self, config: DatasetConfig, directory: Path) -> Rows:  # noqa: ARG002 - all of the files are read
        """Return the problems. Raises ``DatasetError`` naming the line of one that cannot be checked."""
        path = directory / self.path
        lines = read_json_lines(found) if (found := find_answers(path)).exists() else ()
        answers = {row["id"]: row["ground_truth"] for _, row in lines}
        return [
            plain_row(create_problem(row, answers, where=f"{path.parent / where}"), where)
            for where, row in read_json_lines(path)
        ]


# ---------------------------------------------------------------------------------------------------- the format


def find_answers(path: Path) -> Path:
    """Return the file with the answers to the problems of ``path``."""
    return path.parent / "possible_answer" / path.name


def create_problem(row: Mapping[str, Any], answers: Mapping[str, Sequence[Any]], *, where: str) -> dict[str, Any]:
    """Return a problem: ``id``, ``messages``, ``tools`` in OpenAI's format, ``functions`` and ``answers``.

    ``answers`` are those of the whole file, by id; ``where`` names the line. Raises ``DatasetError`` for a line that is
    not a problem of one turn, and for one without an answer.
    """
    name, turns, functions = row.get("id"), row.get("question"), row.get("function")
    if not isinstance(name, str) or not isinstance(turns, list) or not turns:
        raise DatasetError(f"{where} is not a problem of BFCL: it needs id, question and function.")
    # Refused instead of scored: a score of 0 for them would say nothing about the model.
    if any(name.startswith(kind) for kind in _UNSUPPORTED) or len(turns) != 1 or not isinstance(functions, list):
        raise DatasetError(
            f"{where}: {name} has {len(turns)} turns, or tools that BFCL simulates; only problems of one turn with "
            "their own functions can be checked."
        )
    if any(language in name for language in _OTHER_LANGUAGES):
        raise DatasetError(f"{where}: the arguments of {name} are source code of another language than Python.")
    if expects_calls(name) and _needs_answers(name) and name not in answers:
        raise DatasetError(f"{where}: there is no answer to {name} in the directory possible_answer.")
    return {
        "id": name,
        "messages": turns[0],
        "tools": [{"type": "function", "function": convert_function(function)} for function in functions],
        "functions": functions,
        "answers": list(answers.get(name, ())),
    }


def expects_calls(name: str) -> bool:
    """Return whether the problem with this id is to be answered by calls."""
    return "irrelevance" not in name


def _needs_answers(name: str) -> bool:
    return "relevance" not in name


def convert_function(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function as an OpenAI tool has it: types of JSON Schema, and a name without dots."""
    return {
        "name": _tool_name(function["name"]),
        "description": function.get("description", ""),
        "parameters": _convert_schema(function.get("parameters", {"type": "dict", "properties": {}})),
    }


def _tool_name(name: str) -> str:
    return name.replace(".", "_")


def _convert_schema(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    changed = {key: _convert_schema(value) for key, value in schema.items() if key not in ("properties", "default")}
    if "default" in schema:
        changed["default"] = schema["default"]
    if isinstance(properties := schema.get("properties"), dict):
        # A parameter may be called "type", so that properties are not read as a schema.
        changed["properties"] = {name: _convert_schema(value) for name, value in properties.items()}
    if isinstance(kind := schema.get("type"), str):
        changed["type"] = _TYPES.get(kind, kind)
    return changed


# ----------------------------------------------------------------------------------------------------- the check


def find_fault(problem: Mapping[str, Any], calls: Sequence[FunctionCall]) -> str | None:
    """Return what is wrong with the calls of an answer, or ``None`` if they are right.

    Several calls may be in any order. Each must be of the expected function, with all arguments that are required or
    that no answer leaves out, and no other; each value must be of the parameter's type, and one of the answer's values.
    Texts are compared without case, blanks and ``,./-_*^``.
    """
    if not expects_calls(problem["id"]):
        return f"{len(calls)} calls, and none of the functions helps" if calls else None
    if not _needs_answers(problem["id"]):
        return None if calls else "no call"
    expected = problem["answers"]
    if len(calls) != len(expected):
        return f"{len(calls)} calls instead of {len(expected)}"
    functions = {function["name"]: function for function in problem["functions"]}
    left = list(calls)
    for answer in expected:
        # As in BFCL's checker, an expected call takes the first of the calls that fits it, and others have to do
        # with the rest: numbers stay comparable.
        ((name, values),) = answer.items()
        faults = [_find_fault_in_call(call, functions[name], values) for call in left]
        if None not in faults:
            return f"no call of {name} is right: {'; '.join(fault for fault in faults if fault)}"
        del left[faults.index(None)]
    return None


def _find_fault_in_call(
    call: FunctionCall, function: Mapping[str, Any], values: Mapping[str, Sequence[Any]]
) -> str | None:
    if call.name not in (function["name"], _tool_name(function["name"])):
        return f"it calls {call.name}"
    if call.arguments is None:
        return "its arguments are not a JSON object"
    parameters = function["parameters"]
    known = parameters.get("properties", {})
    for name, value in call.arguments.items():
        if name not in known or name not in values:
            return f"{name} is unexpected"
        if not _is_right_value(value, known[name], values[name]):
            return f"{name} is {value!r}"
    needed = {*parameters.get("required", ()), *(name for name in values if _OMITTED not in values[name])}
    missing = sorted(needed - call.arguments.keys())
    return f"{', '.join(missing)} is missing" if missing else None


def _is_right_value(value: Any, schema: Mapping[str, Any], choices: Sequence[Any]) -> bool:
    kind = _python_type(schema)
    if kind is float and type(value) is int:
        value = float(value)
    example = next((choice for choice in choices if choice != _OMITTED), None)
    if example is not None and type(example) is not kind:
        # The expected value is a variable, which its name stands for; or the answer's own type is laxer.
        return type(value) in (kind, type(example)) and value in choices
    if type(value) is not kind:
        return False
    if kind is dict:
        return any(_is_right_object(value, choice) for choice in choices if choice != _OMITTED)
    if kind is list and _python_type(schema.get("items", {})) is dict:
        return any(_is_right_list_of_objects(value, choice) for choice in choices)
    return _normalise(value) in [_normalise(choice) for choice in choices]


def _python_type(schema: Mapping[str, Any]) -> type:
    kind = str(schema.get("type", "any"))
    return _PYTHON.get(_TYPES.get(kind, kind), str)


def _is_right_object(value: Any, choice: Mapping[str, Sequence[Any]]) -> bool:
    if not isinstance(value, dict) or not isinstance(choice, dict) or not value.keys() <= choice.keys():
        return False
    is_right = all(_normalise(each) in [_normalise(one) for one in choice[name]] for name, each in value.items())
    return is_right and all(name in value or _OMITTED in values for name, values in choice.items())


def _is_right_list_of_objects(value: Any, choice: Any) -> bool:
    return isinstance(choice, list) and len(value) == len(choice) and all(map(_is_right_object, value, choice))


def _normalise(value: Any) -> Any:
    """Return a value as it is compared: texts, also in a list, without case, blanks and punctuation."""
    if isinstance(value, str):
        return _IGNORED.sub("", value).lower().replace("'", '"')
    if isinstance(value, list):
        return [_normalise(each) if isinstance(each, str) else each for each in value]
    return value


# ------------------------------------------------------------------------------------------------------ the agent


@frozen(kw_only=True)
class FunctionCaller:
    """Asks once, with the problem's functions as tools. The reward is 1 if the calls are right, and 0 otherwise."""

    system_prompt: str = ""
    temperature: float = 1.0
    max_tokens: int | None = None

    async def run(self, data: Mapping[str, Any], **extra_kwargs: Any) -> float:
        """Answer one problem, and return the reward. Raises ``HTTPStatusError`` if the model refuses the request."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        answer = await extra_kwargs["http_client"].post(
            f"{extra_kwargs['base_url']}/chat/completions",
            headers={"Authorization": f"Bearer {extra_kwargs['api_key']}"},
            json={
                "model": "policy",
                "messages": [*system, *data["messages"]],
                "tools": data["tools"],
                "temperature": self.temperature,
                **limit,
            },
        )
        answer.raise_for_status()
        message = answer.json()["choices"][0]["message"]
        calls = []
        for function in (call["function"] for call in message.get("tool_calls") or ()):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except ValueError:
                arguments = None
            calls.append(FunctionCall(function["name"], arguments if isinstance(arguments, dict) else None))
        return float(find_fault(data, calls) is None)
