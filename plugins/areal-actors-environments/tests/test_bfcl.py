"""Problems of function calling in BFCL's format: which files are read, and which calls are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.datasets import DatasetConfig, load_problems
from areal_actors.errors import DatasetError
from areal_actors_environments.bfcl import BfclFile, FunctionCall, convert_function, find_fault

EXAMPLES = Path(__file__).parents[3] / "examples" / "bfcl"


def load(path: Path) -> list[dict[str, Any]]:
    """The problems of a file, in its order."""
    config = DatasetConfig(plugins={"bfcl": BfclFile(path=path.name)}, is_shuffled=False)
    problems = load_problems(config, import_reference=lambda _: None, directory=path.parent)
    return [dict(problem.data) for problem in problems.all()]


def right_calls(problem: dict[str, Any]) -> list[FunctionCall]:
    """The calls of the answer, with the first value of each argument that is not left out."""
    calls = []
    for answer in problem["answers"]:
        ((name, values),) = answer.items()
        arguments = {key: _first(choices) for key, choices in values.items() if "" not in choices}
        calls.append(FunctionCall(name.replace(".", "_"), arguments))
    return calls


def _first(choices: list[Any]) -> Any:
    (value, *_) = choices
    return {key: each[0] for key, each in value.items()} if isinstance(value, dict) else value


WITH_CALLS = [problem for name in ("simple", "multiple", "parallel") for problem in load(EXAMPLES / f"{name}.json")]


# ---------------------------------------------------------------------------------------------------------- the check


@given(problem=st.sampled_from(WITH_CALLS), data=st.data())
def test_bfcl_accepts_expected_calls_in_any_order(problem: dict[str, Any], data: st.DataObject) -> None:
    """And wrong if one is repeated, left out, or lacks one of its arguments."""
    calls = data.draw(st.permutations(right_calls(problem)))

    assert find_fault(problem, calls) is None
    assert find_fault(problem, [*calls, calls[0]]) == f"{len(calls) + 1} calls instead of {len(calls)}"
    assert find_fault(problem, calls[1:]) == f"{len(calls) - 1} calls instead of {len(calls)}"
    assert calls[0].arguments is not None
    left_out = data.draw(st.sampled_from(sorted(calls[0].arguments)))
    lacking = {name: value for name, value in calls[0].arguments.items() if name != left_out}
    assert f"{left_out} is missing" in str(find_fault(problem, [FunctionCall(calls[0].name, lacking), *calls[1:]]))


def problem_with(schema: dict[str, Any], choices: list[Any], *, required: bool = True) -> dict[str, Any]:
    """A problem whose one function has one parameter."""
    parameters = {"type": "dict", "properties": {"x": schema}, "required": ["x"] if required else []}
    return {
        "id": "simple_0",
        "functions": [{"name": "f", "parameters": parameters}],
        "answers": [{"f": {"x": choices}}],
    }


@pytest.mark.parametrize(
    ("schema", "choices", "right", "wrong"),
    [
        ({"type": "integer"}, [5], [5], [5.0, "5", True, 6]),
        ({"type": "float"}, [5.0, 0.5], [5, 5.0, 0.5], ["5", 4]),
        ({"type": "boolean"}, [True], [True], [1, "true", False]),
        ({"type": "string"}, ["April 1, 2024"], ["april 1 2024", "April 1,2024"], ["April 2, 2024", 1]),
        ({"type": "any"}, ["it's"], ['IT"S'], ["its"]),
        ({"type": "array", "items": {"type": "string"}}, [["A", "b"]], [["a", "B."]], [["b", "a"], "a, b", ["a"]]),
        ({"type": "tuple", "items": {"type": "integer"}}, [[1, 2]], [[1, 2]], [[2, 1]]),
        (
            {"type": "dict"},
            [{"a": [1], "b": ["x", ""]}],
            [{"a": 1}, {"a": 1, "b": "X"}],
            [{"b": "x"}, {"a": 1, "c": 2}],
        ),
        (
            {"type": "array", "items": {"type": "dict"}},
            [[{"a": [1]}, {"a": [2]}]],
            [[{"a": 1}, {"a": 2}]],
            [[{"a": 2}, {"a": 1}], [{"a": 1}]],
        ),
        ({"type": "integer"}, ["num_days"], ["num_days"], ["other", 3]),  # a variable of the question
    ],
)
def test_bfcl_checks_types_of_values(
    schema: dict[str, Any], choices: list[Any], right: list[Any], wrong: list[Any]
) -> None:
    """An integer is a float, and nothing else is converted; texts are compared without case and punctuation."""
    problem = problem_with(schema, choices)

    assert [find_fault(problem, [FunctionCall("f", {"x": value})]) for value in right] == [None] * len(right)
    for value in wrong:
        assert find_fault(problem, [FunctionCall("f", {"x": value})]) == f"no call of f is right: x is {value!r}"


def test_bfcl_accepts_optional_arguments() -> None:
    """An empty text among its values."""
    assert find_fault(problem_with({"type": "integer"}, ["", 1], required=False), [FunctionCall("f", {})]) is None
    assert find_fault(problem_with({"type": "integer"}, [1], required=False), [FunctionCall("f", {})]) is not None


def test_bfcl_describes_wrong_calls() -> None:
    """Another function, an argument that does not exist, and arguments that are not JSON."""
    problem = problem_with({"type": "integer"}, [1])

    assert "it calls g" in str(find_fault(problem, [FunctionCall("g", {"x": 1})]))
    assert "y is unexpected" in str(find_fault(problem, [FunctionCall("f", {"x": 1, "y": 2})]))
    assert "its arguments are not a JSON object" in str(find_fault(problem, [FunctionCall("f", None)]))


def test_bfcl_accepts_no_call_for_irrelevance() -> None:
    """Irrelevance has no answers; relevance asks for any call."""
    irrelevant, relevant = (
        {"id": name, "functions": [], "answers": []} for name in ("irrelevance_0", "live_relevance_1")
    )
    call = [FunctionCall("f", {})]

    assert (find_fault(irrelevant, []), find_fault(relevant, call)) == (None, None)
    assert (find_fault(irrelevant, call), find_fault(relevant, [])) == (
        "1 calls, and none of the functions helps",
        "no call",
    )


# --------------------------------------------------------------------------------------------------------- the format


def test_bfcl_converts_functions_to_tools() -> None:
    """With types of JSON Schema at every depth, names without dots, and parameters that are called type."""
    inner = {"type": "dict", "properties": {"type": {"type": "float", "description": "Its type."}}}
    schema = {"type": "dict", "properties": {"type": {"type": "tuple", "items": inner}}, "required": ["type"]}

    tool = convert_function({"name": "a.b", "description": "B.", "parameters": schema})

    expected = {"type": "object", "properties": {"type": {"type": "number", "description": "Its type."}}}
    assert tool == {
        "name": "a_b",
        "description": "B.",
        "parameters": {
            "type": "object",
            "properties": {"type": {"type": "array", "items": expected}},
            "required": ["type"],
        },
    }


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": []}, "simple.json, line 1 is not a problem of BFCL: it needs id, question and function"),
        ({"id": "simple_0", "question": [[], []], "function": []}, "simple_0 has 2 turns"),
        ({"id": "multi_turn_base_0", "question": [[]], "function": []}, "multi_turn_base_0 has 1 turns, or tools that"),
        ({"id": "simple_javascript_0", "question": [[]], "function": []}, "source code of another language"),
        (
            {"id": "simple_0", "question": [[]], "function": []},
            "no answer to simple_0 in the directory",
        ),
    ],
)
def test_bfcl_refuses_problems_that_it_cannot_check(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    """Before the first episode, with the line."""
    path = tmp_path / "simple.json"
    path.write_text(json.dumps(row), encoding="utf-8")

    with pytest.raises(DatasetError, match=message):
        load(path)
