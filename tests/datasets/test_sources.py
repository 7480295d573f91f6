"""Where problems come from: each source as it is meant to be used, and each way in which it can be wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.datasets import DatasetConfig, Problems, find_overlap, find_shortage, load_problems
from areal_actors.errors import DatasetError


def importer(target: Any) -> Any:
    return lambda _reference: target


def load(directory: Path | None = None, *, target: Any = None, **settings: Any) -> Problems:
    config = DatasetConfig(is_shuffled=False, **settings)
    return load_problems(config, import_reference=importer(target), directory=directory)


def data(problems: Problems) -> list[Any]:
    return [problem.data for problem in problems.all()]


# ------------------------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize("settings", [{}, {"jsonl": "a.jsonl", "python": "a.py:f"}])
def test_dataset_needs_exactly_one_source(settings: dict[str, Any]) -> None:
    """None and two are said as such."""
    with pytest.raises(ValueError, match="must name exactly one source of jsonl, huggingface, reasoning_gym, python"):
        DatasetConfig(**settings)


@given(total=st.integers(1, 40), start=st.integers(0, 40), size=st.integers(1, 40))
def test_parts_of_a_dataset_do_not_overlap(total: int, start: int, size: int) -> None:
    """What is held out by ``start`` and ``size`` is not in the part before it."""

    def numbers(num: int, seed: int) -> list[dict[str, int]]:
        return [{"n": n} for n in range(min(num, total))]

    first, asked = load(python="f", target=numbers, size=size), DatasetConfig(python="f", size=size)

    assert [{"n": n} for n in range(min(size, total))] == data(first)
    assert (size > total) == (find_shortage(asked, first) is not None)
    if size < total:
        rest = load(python="f", target=numbers, start=size, size=total)
        assert find_overlap(first, rest) == 0
        assert total == len(first) + len(rest)


# -------------------------------------------------------------------------------------------------------------- JSONL


def test_jsonl_lines_become_problems(tmp_path: Path) -> None:
    """In order; blank lines and a byte order mark are skipped; integers keep all their digits."""
    rows = [{"question": "1 + 1", "answer": 2}, {"question": "é", "answer": 12345678901234567890123}]
    text = "\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"
    (tmp_path / "problems.jsonl").write_text(text, encoding="utf-8")

    assert rows == data(load(tmp_path, jsonl="problems.jsonl"))
    assert rows[1:] == data(load(tmp_path, jsonl="problems.jsonl", start=1))
    assert rows[:1] == data(load(tmp_path, jsonl="problems.jsonl", size=1))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"question": ', "is not JSON"),
        (b"[1, 2]", "is a JSON list"),
        (b'{"answer": NaN}', "NaN is not JSON"),
        (b'{"answer": -1e400}', "-1e400 is too large"),
        (b"\xff\xfe", "the file is UTF-16; save it as UTF-8"),
        (b"[" * 100_000, "is nested too deep"),
    ],
)
def test_invalid_jsonl_line_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    """By its number, counted as editors count."""
    (tmp_path / "problems.jsonl").write_bytes(b'{"n": 1}\n\n' + line + b"\n")

    with pytest.raises(DatasetError, match=rf"problems\.jsonl, line 3 .*{said}|problems\.jsonl, line 3 {said}"):
        load(tmp_path, jsonl="problems.jsonl")


def test_missing_or_empty_jsonl_is_named(tmp_path: Path) -> None:
    """A wrong path and an empty file are different mistakes."""
    with pytest.raises(DatasetError, match=r"nowhere\.jsonl cannot be read: No such file"):
        load(tmp_path, jsonl="nowhere.jsonl")

    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DatasetError, match="no problems"):
        load(tmp_path, jsonl="empty.jsonl")


def test_part_beyond_the_end_is_refused(tmp_path: Path) -> None:
    """Nothing is left to train on."""
    (tmp_path / "one.jsonl").write_text("{}\n")
    with pytest.raises(DatasetError, match="no problems"):
        load(tmp_path, jsonl="one.jsonl", start=1)


# -------------------------------------------------------------------------------------------------------- Hugging Face


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with two splits, and one split alone, as ``save_to_disk`` writes them."""
    datasets = pytest.importorskip("datasets")
    path = tmp_path_factory.mktemp("datasets")
    parts = {
        name: datasets.Dataset.from_list([{"question": f"{name} {n}", "n": n} for n in range(5)])
        for name in ("train", "test")
    }
    datasets.disable_progress_bars()
    datasets.DatasetDict(parts).save_to_disk(str(path / "both"))
    parts["test"].save_to_disk(str(path / "alone"))
    return path


def test_saved_dataset_is_read(saved: Path) -> None:
    """One split of several, or the only one; parts of it like of any other source."""
    assert [{"question": f"train {n}", "n": n} for n in range(5)] == data(
        load(saved, huggingface="both", split="train")
    )
    assert [{"question": "test 2", "n": 2}] == data(load(saved, huggingface="alone", start=2, size=1))
    assert len(load(saved, huggingface="alone", size=100)) == 5


@pytest.mark.parametrize("split", [None, "validation"])
def test_unknown_split_is_refused(saved: Path, split: str | None) -> None:
    """Those that are there are listed."""
    with pytest.raises(DatasetError, match=r"has the splits train, test, and .*split"):
        load(saved, huggingface="both", split=split)


def test_directory_without_a_dataset_is_refused(saved: Path, tmp_path: Path) -> None:
    """An empty directory, and none at all."""
    for name in (".", "nowhere"):
        with pytest.raises(DatasetError, match="not a dataset that save_to_disk"):
            load(tmp_path, huggingface=name)


# ------------------------------------------------------------------------------------------------------- reasoning-gym


def test_reasoning_gym_scores_its_problems() -> None:
    """As many as asked for, equal for equal seeds; the plain data suffice for the generator's own score."""
    gym = pytest.importorskip("reasoning_gym")
    settings: dict[str, Any] = {"reasoning_gym": "chain_sum", "size": 5, "options": {"max_terms": 3}}
    problems = data(load(**settings, seed=1))
    score = gym.get_score_answer_fn(problems[0]["metadata"]["source_dataset"])

    assert len(problems) == 5
    assert problems == data(load(**settings, seed=1))
    assert [1.0] * 5 == [score(answer=problem["answer"], entry=problem) for problem in problems]
    assert score(answer="no number", entry=problems[0]) == 0.0


def test_reasoning_gym_seeds_make_different_problems() -> None:
    """The generator itself would make almost the same ones: it adds the seed to the number of the problem."""
    pytest.importorskip("reasoning_gym")
    settings: dict[str, Any] = {"reasoning_gym": "chain_sum", "size": 50, "options": {"min_terms": 5, "min_digits": 3}}

    assert find_overlap(load(**settings, seed=1), load(**settings, seed=2)) == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [("chain_sum", {"no_such_option": 1}), ("chain_sum", {"min_terms": 9, "max_terms": 2})],
)
def test_reasoning_gym_errors_are_named(name: str, options: dict[str, Any]) -> None:
    """The name and the options as they were given, and the generator's own words."""
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DatasetError, match=f"cannot make '{name}' with"):
        load(reasoning_gym=name, options=options, size=2)
    with pytest.raises(DatasetError, match="no generator 'chain_sums'; did you mean chain_sum"):
        load(reasoning_gym="chain_sums")


# ----------------------------------------------------------------------------------------------------- Python functions


def test_python_source_gets_number_seed_and_options() -> None:
    """By keyword; a generator that never ends is stopped."""

    def squares(num: int, seed: int, *, offset: int) -> Iterator[dict[str, int]]:
        return ({"n": n * n + offset, "of": num, "seed": seed} for n in count())

    problems = load(python="f.py:squares", target=squares, start=1, size=2, seed=7, options={"offset": 100})

    assert [{"n": 101, "of": 3, "seed": 7}, {"n": 104, "of": 3, "seed": 7}] == data(problems)


def wrong_arguments(amount: int) -> list[dict[str, int]]:
    return [{"n": amount}]


def raises(num: int, seed: int) -> list[dict[str, int]]:
    raise TypeError(f"{num} is not a number of mine")


def raises_later(num: int, seed: int) -> Iterator[dict[str, int]]:
    yield {"n": 1}
    raise LookupError("the well is dry")


def wrong_items(num: int, seed: int) -> list[int]:
    return [1, 2]


def none_items(num: int, seed: int) -> list[dict[str, int] | None]:
    return [{"n": 1}, None]


def no_items(num: int, seed: int) -> int:
    return 1


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ([{"n": 1}], "is a list, not a function"),
        (wrong_arguments, r"f\.py:f\(num, seed\) does not fit the function"),
        (raises, "raised TypeError: .* is not a number of mine"),
        (raises_later, "raised LookupError: the well is dry"),
        (wrong_items, "yields a int as problem 0; each problem is a dict"),
        (none_items, "yields a NoneType as problem 1; each problem is a dict"),
        (no_items, "raised TypeError: 'int' object is not iterable"),
    ],
)
def test_python_source_without_problems_is_refused(target: Any, said: str) -> None:
    """What does not fit is told apart from what was raised inside."""
    with pytest.raises(DatasetError, match=said):
        load(python="f.py:f", target=target)


def test_python_source_may_yield_one_changing_dict() -> None:
    """Each problem has the values that it had when it was yielded."""

    def changing(num: int, seed: int) -> Iterator[dict[str, Any]]:
        problem: dict[str, Any] = {"of": []}
        for number in range(num):
            problem["of"].append(number)
            yield problem

    problems = load(python="f.py:f", target=changing, size=3)

    assert [{"of": [0]}, {"of": [0, 1]}, {"of": [0, 1, 2]}] == [dict(problem.data) for problem in problems.all()]
