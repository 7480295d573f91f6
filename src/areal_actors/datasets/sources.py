"""Sources of problems: a JSONL file, a Hugging Face dataset on disk, a reasoning-gym generator, a Python function.

A configuration names exactly one of them::

    dataset: {jsonl: problems.jsonl}
    dataset: {huggingface: data/gsm8k, split: train}
    dataset: {reasoning_gym: chain_sum, size: 500, seed: 1, options: {max_terms: 3}}
    dataset: {python: "tool_agent.py:problems", size: 512, seed: 1}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NewType

import orjson
from attrs import field, frozen
from attrs.validators import ge, optional

from areal_actors.datasets.problems import Problems
from areal_actors.errors import DatasetError

__all__ = ["DataPath", "DatasetConfig", "ProblemsReference", "load_problems"]

DataPath = NewType("DataPath", str)
"""A file or directory of problems; in a configuration file, relative to it."""

ProblemsReference = NewType("ProblemsReference", str)
"""A function that yields problems: ``file.py:name``, relative to the configuration file, or ``module:name``."""

Import = Callable[[str], Any]
_KINDS = ("jsonl", "huggingface", "reasoning_gym", "python")


@frozen(kw_only=True)
class DatasetConfig:
    """One source, and what is taken of it. Paths are relative to the configuration file.

    ``size`` bounds the number of problems (generators make that many); ``seed`` is the generator's. ``options`` go to the
    reasoning-gym generator, or to the Python function as keyword arguments. ``is_shuffled`` permutes each epoch anew.
    """

    jsonl: DataPath | None = None
    huggingface: DataPath | None = None
    split: str | None = None
    reasoning_gym: str | None = None
    python: ProblemsReference | None = None
    size: int | None = field(default=None, validator=optional(ge(1)))
    seed: int = 0
    options: Mapping[str, Any] = field(factory=dict)
    is_shuffled: bool = True

    def __attrs_post_init__(self) -> None:
        """Raises ``ValueError`` unless exactly one source is named."""
        named = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(named) != 1:
            found = f"it names {' and '.join(named)}" if named else "it names none"
            raise ValueError(f"name exactly one source of {', '.join(_KINDS)}; {found}")


def load_problems(
    config: DatasetConfig, *, import_reference: Import, directory: Path | None = None, shuffle_seed: int = 0
) -> Problems:
    """Read or make the problems. ``import_reference`` finds the object behind ``file.py:name``.

    Raises ``DatasetError`` naming the source, and for files the line, that is at fault.
    """
    rows = _rows(config, import_reference, directory or Path.cwd())
    if config.size is not None:
        rows = rows[: config.size]
    return Problems(rows, seed=shuffle_seed, is_shuffled=config.is_shuffled)


def _rows(config: DatasetConfig, import_reference: Import, directory: Path) -> Sequence[Mapping[str, Any]]:
    if config.jsonl is not None:
        return _read_jsonl(directory / config.jsonl)
    if config.huggingface is not None:
        return _load_huggingface(directory / config.huggingface, config.split)
    if config.reasoning_gym is not None:
        return _generate(config.reasoning_gym, config)
    assert config.python is not None
    return _call(config.python, import_reference(config.python), config)


def _read_jsonl(path: Path) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    rows.append(_parse_line(path, number, line))
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}.") from error
    return rows


def _parse_line(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DatasetError(f"{path}, line {number} is no JSON: {error}.") from None
    if not isinstance(row, dict):
        raise DatasetError(f"{path}, line {number} is a JSON {type(row).__name__}; each line is one object.")
    return row


def _load_huggingface(path: Path, split: str | None) -> Sequence[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise DatasetError(
            "Datasets of Hugging Face need their library: pip install 'areal_actors[datasets]'"
        ) from None
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} is no dataset that save_to_disk() wrote: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise DatasetError(f"{path} has the splits {', '.join(found)}; 'split' says {split!r}.")
        found = found[split]
    rows: Sequence[Mapping[str, Any]] = found.to_list()
    return rows


def _generate(name: str, config: DatasetConfig) -> list[Mapping[str, Any]]:
    """Problems of reasoning-gym. The agent scores an answer with ``data["score"](answer)``."""
    try:
        import reasoning_gym
    except ImportError:
        raise DatasetError("Generators of reasoning-gym need it: pip install 'areal_actors[recipes]'") from None
    try:
        made = reasoning_gym.create_dataset(name, size=config.size or 1000, seed=config.seed, **config.options)
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise DatasetError(f"reasoning-gym cannot make {name!r} with {dict(config.options)}: {error}") from error
    return [
        {
            "question": entry["question"],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
            "score": _Scorer(made, entry),
        }
        for entry in made
    ]


@frozen
class _Scorer:
    """The generator's own score of an answer, in [0, 1]."""

    dataset: Any = field(repr=False)
    entry: Mapping[str, Any]

    def __call__(self, answer: str | None) -> float:
        return float(self.dataset.score_answer(answer, dict(self.entry)))


def _call(reference: str, function: Any, config: DatasetConfig) -> list[Mapping[str, Any]]:
    if not callable(function):
        raise DatasetError(f"{reference} is no function; it returns the problems as dicts.")
    arguments = {"num": config.size or 1000, "seed": config.seed, **config.options}
    try:
        rows = list(function(**arguments))
    except TypeError as error:
        raise DatasetError(f"{reference}({', '.join(arguments)}) does not fit: {error}") from error
    bad = next((row for row in rows if not isinstance(row, Mapping)), None)
    if bad is not None:
        raise DatasetError(f"{reference} yields {type(bad).__name__}s; each problem is a dict.")
    return rows
