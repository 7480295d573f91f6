"""Sources of problems: a file, a Hugging Face dataset, a generator, a function, or what a plug-in adds.

A configuration names exactly one of them::

    dataset: {jsonl: problems.jsonl}
    dataset: {huggingface: data/gsm8k, split: train}
    dataset: {huggingface: openai/gsm8k, subset: main, split: train}
    dataset: {reasoning_gym: chain_sum, size: 500, seed: 1, options: {max_terms: 3}}
    dataset: {python: "tool_agent.py:problems", size: 512, seed: 1}
    dataset: {harbor: tasks}                                               # areal-actors-environments

Held-out problems are configured the same way: with another ``seed`` for a generator, or another part (``start``,
``size``) of a file.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, NewType, NoReturn, Protocol, cast

import numpy as np
from attrs import field, frozen
from attrs.validators import ge, optional

from areal_actors.datasets.problems import Problems
from areal_actors.datasets.values import plain_row, without_null_keys
from areal_actors.errors import ArealError, DatasetError
from areal_actors.lib.plugins import PluginGroup, plugin_names, plugin_settings
from areal_actors.lib.settings import COMMON

DataPath = NewType("DataPath", str)
"""A file or directory of problems; in a configuration file, relative to it."""

HubDataset = NewType("HubDataset", str)
"""A directory that ``save_to_disk`` wrote, relative to the configuration file, or ``owner/name`` on the hub."""

ProblemsReference = NewType("ProblemsReference", str)
"""A function that yields problems: ``file.py:name``, relative to the configuration file, or ``module:name``."""

Import = Callable[[str], Any]
Rows = Sequence[Mapping[str, Any]]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_KINDS = ("jsonl", "huggingface", "reasoning_gym", "python")
_NUM_MADE = 1000
"""Default number of problems to generate."""


class DatasetPlugin(Protocol):
    """A source of problems that a plug-in adds: an attrs class with its settings."""

    @property
    def source(self) -> str:
        """What the problems come from, for messages."""
        ...

    def load(self, config: DatasetConfig, directory: Path) -> Rows:
        """Return the problems that ``config`` asks for, of values that ``plain_row`` accepts; this blocks.

        Paths are relative to ``directory``. Raises ``DatasetError``.
        """
        ...


@frozen(kw_only=True)
class DatasetConfig:
    """One source of problems, and the part that is used. Paths are relative to the configuration file.

    ``start`` problems are skipped and ``size`` are taken (``None``: all of a file; 1000 of a generator). ``seed`` is
    passed to generators: different seeds make different problems. ``options`` are passed to the reasoning-gym
    generator, or to the Python function as keyword arguments in addition to ``num`` and ``seed``. Problems
    are permuted again in each epoch.
    """

    jsonl: DataPath | None = field(default=None, metadata=COMMON)
    huggingface: HubDataset | None = field(default=None, metadata=COMMON)
    """A directory that save_to_disk() wrote, or an id of the Hugging Face hub (owner/name)."""
    subset: str | None = None
    """Configuration of a dataset of the hub that has several."""
    split: str | None = None
    reasoning_gym: str | None = None
    python: ProblemsReference | None = None
    plugins: Mapping[str, DatasetPlugin] = plugin_settings(PluginGroup.DATASETS)
    """The source of a plug-in by its name."""
    start: int = field(default=0, validator=ge(0))
    size: int | None = field(default=None, validator=optional(ge(1)))
    seed: int = field(default=0, validator=ge(0))
    options: Mapping[str, Any] = field(factory=dict)
    is_shuffled: bool = True

    def __attrs_post_init__(self) -> None:
        """Raise ``ValueError`` unless exactly one source is named."""
        named = [*(kind for kind in _KINDS if getattr(self, kind) is not None), *self.plugins]
        if len(named) != 1:
            found = f"it names {' and '.join(named)}" if named else "it names none"
            kinds = ", ".join((*_KINDS, *plugin_names(PluginGroup.DATASETS)))
            raise ValueError(f"must name exactly one source of {kinds}; {found}")

    @property
    def source(self) -> str:
        """The file, dataset, generator or function that the problems come from, or what a plug-in says."""
        added = (one.source for one in self.plugins.values())
        return str(next(filter(None, (self.jsonl, self.huggingface, self.reasoning_gym, self.python, *added))))

    @property
    def num_made(self) -> int:
        """The number of problems to request from a generator."""
        return self.start + (self.size or _NUM_MADE)


def load_problems(
    config: DatasetConfig, *, import_reference: Import, directory: Path | None = None, shuffle_seed: int = 0
) -> Problems:
    """Read or generate the problems; this blocks. ``import_reference`` returns the object behind ``file.py:name``.

    Paths are relative to ``directory`` (default: the working directory). Raises ``DatasetError`` naming the source, and
    for files the line, of the error, such as a value that cannot be sent to an agent in another process (``values``).
    """
    directory = directory or Path.cwd()
    if config.jsonl is not None:
        rows: Rows = [plain_row(row, where) for where, row in read_json_lines(directory / config.jsonl)]
    elif config.huggingface is not None:
        rows = cast("Rows", _load_huggingface(directory, config.huggingface, config))
    elif config.reasoning_gym is not None:
        rows = _plain_rows(config.reasoning_gym, _generate(config.reasoning_gym, config))
    elif config.python is not None:
        rows = _call(config.python, import_reference(config.python), config)
    else:
        rows = next(iter(config.plugins.values())).load(config, directory)
    end = len(rows) if config.size is None else config.start + config.size
    if config.start >= len(rows):
        after = f" from number {config.start} on" if len(rows) else ""
        raise DatasetError(f"{config.source} has no problems{after}: {len(rows)} in all.")
    return Problems(rows[config.start : end], seed=shuffle_seed, is_shuffled=config.is_shuffled)


def find_shortage(config: DatasetConfig, problems: Problems) -> str | None:
    """Return a sentence if ``config`` has loaded fewer problems than its ``size``, or ``None``."""
    if config.size is None or len(problems) >= config.size:
        return None
    return f"{config.source} has {len(problems)} problems from start on, fewer than size {config.size}"


def _plain_rows(source: str, rows: Rows) -> Rows:
    return [_made_row(source, number, row) for number, row in enumerate(rows)]


# ------------------------------------------------------------------------------------------------------- files


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON object of each line that is not empty, with its place for messages: ``a.jsonl, line 3``.

    Raises ``DatasetError`` for a file that cannot be read, and for a line that is not a JSON object.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    # Python's parser keeps integers of any size, which problems of arithmetic have.
                    row = json.loads(
                        line.decode("utf-8-sig"), parse_constant=_refuse_constant, parse_float=_parse_finite
                    )
                except RecursionError:
                    raise DatasetError(f"{path}, line {number} is nested too deep; flatten it.") from None
                except UnicodeDecodeError as error:
                    advice = _advise(line) or f"save the file as UTF-8; it has {line[error.start : error.end]!r} here"
                    raise DatasetError(f"{path}, line {number} is not UTF-8 text: {advice}.") from None
                except ValueError as error:
                    # Of a later line, only damage is certain: the first one was JSON.
                    reason = (_advise(line) if number == 1 or b"\0" in line else None) or error
                    raise DatasetError(f"{path}, line {number} is not JSON: {reason}.") from None
                if not isinstance(row, dict):
                    raise DatasetError(
                        f"{path}, line {number} is a JSON {type(row).__name__}; each line is one object"
                        f"{f'. {_SPLIT}' if isinstance(row, list) else '.'}"
                    )
                yield f"{path.name}, line {number}", row
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}.") from error


_SPLIT = "jq -c '.[]' FILE writes the elements of an array in this way."
_OTHER_FORMATS: Sequence[tuple[bytes, str]] = (
    (rb"\x1f\x8b", "the file is compressed; unpack it with gunzip"),
    (rb"PK\x03\x04", "the file is a zip archive; unpack it"),
    (rb"PAR1", "the file is Parquet; convert it with datasets.Dataset.from_parquet(FILE).to_json(OUTPUT)"),
    (rb"\xff\xfe|\xfe\xff", "the file is UTF-16; save it as UTF-8"),
    (rb"(?s).*\0", "the line has NUL bytes, as a file has that was cut by a crash; write it again"),
    (rb"\s*\[\s*$", f"an array over several lines; each line is one object. {_SPLIT[:-1]}"),
    (rb"\s*\{\s*$", "an object over several lines; each line is one object. jq -c . FILE writes it so"),
    (
        rb"[^{\[]*[,;\t]",
        "it looks like CSV; each line is one object. datasets.Dataset.from_csv(FILE).to_json(OUTPUT) converts it",
    ),
)
"""The beginning of a file, or a line, in another format than JSON Lines, and what to do about it."""


def _advise(line: bytes) -> str | None:
    """Return what to do about a line in another format; ``None`` if it is damaged JSON."""
    return next((advice for pattern, advice in _OTHER_FORMATS if re.match(pattern, line)), None)


def _refuse_constant(name: str) -> NoReturn:
    # Python's parser reads NaN and Infinity, which other readers of the same file refuse.
    raise ValueError(f"{name} is not JSON")


def _parse_finite(literal: str) -> float:
    # Python's parser reads 1e400 as infinity.
    if math.isinf(number := float(literal)):
        raise ValueError(f"{literal} is too large for a number with an exponent")
    return number


@frozen
class _Table:
    """Rows of a Hugging Face dataset, read from disk on access, with the values that ``plain_row`` makes of them.

    Nested keys that are null are left out: the table gave each mapping in a column, such as a tool, the keys of all
    others.
    """

    rows: Any
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _Table(self.rows.select(range(*index.indices(len(self.rows)))), self.name)
        row = {key: without_null_keys(value) for key, value in self.rows[index].items()}
        return plain_row(row, f"{self.name}, row {index}")


def _load_huggingface(directory: Path, name: str, config: DatasetConfig) -> _Table:
    path, split = directory / name, config.split
    try:
        from datasets.exceptions import DatasetNotFoundError

        import datasets
    except ImportError:
        raise DatasetError(
            "Datasets of Hugging Face need their library; run: pip install 'areal_actors[datasets]'"
        ) from None
    is_on_hub = not path.exists() and _HUB_ID.fullmatch(name) is not None
    try:
        # A dataset of the hub is taken from its cache if the hub cannot be reached.
        found = datasets.load_dataset(name, config.subset) if is_on_hub else datasets.load_from_disk(str(path))
    except DatasetNotFoundError as error:
        raise DatasetError(
            f"There is no dataset {name!r}: neither a directory here nor a dataset on the hub. If it is private or "
            "gated, log in with 'hf auth login'."
        ) from error
    except (OSError, ValueError) as error:
        if not is_on_hub:
            raise DatasetError(f"{path} is not a dataset that save_to_disk() wrote: {error}") from error
        # There are several subsets, of which none or an unknown one is named.
        if isinstance(error, ValueError):
            raise DatasetError(
                f"The dataset {name} cannot be loaded; set 'subset' to one that it has: {error}"
            ) from error
        is_offline = datasets.config.HF_HUB_OFFLINE  # pyright: ignore[reportAttributeAccessIssue] - a submodule
        reason = "HF_HUB_OFFLINE is set" if is_offline else f"{type(error).__name__}: {error}"
        raise DatasetError(
            f"{name!r} is neither a directory here nor in the cache, and the hub cannot be reached ({reason}). With a "
            f"network, run datasets.load_dataset({name!r}).save_to_disk(DIRECTORY), and name that directory here."
        ) from error
    if not isinstance(found, datasets.DatasetDict):
        return _open_table(found, name)
    if split not in found:
        where = name if is_on_hub else path
        said = "no split is named" if split is None else f"there is no split {split!r}"
        raise DatasetError(
            f"{where} has the splits {', '.join(map(str, found))}, and {said}; set 'split' to one of them."
        )
    return _open_table(found[split], name)


def _open_table(rows: Any, name: str) -> _Table:
    """Return a table, whose values have one type a column: those that decode to objects are refused before a row is."""
    for column, feature in rows.features.items():
        if getattr(feature, "decode", False):
            kind = type(feature).__name__
            raise DatasetError(
                f"The column {column} of {name} is decoded to an object ({kind}), which cannot be sent to an agent in "
                f"another process. Save it with cast_column({column!r}, {kind}(decode=False)), or without the column."
            )
    return _Table(rows, name)


# -------------------------------------------------------------------------------------------------- generators


def _generate(name: str, config: DatasetConfig) -> Rows:
    """Return problems of reasoning-gym: ``question``, ``answer`` and ``metadata``.

    Its own score is ``reasoning_gym.get_score_answer_fn(data["metadata"]["source_dataset"])(answer, data)``.
    """
    try:
        with warnings.catch_warnings():
            # Python warns of escapes in its sources when it compiles them.
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
    except ImportError:
        raise DatasetError("Generators of reasoning-gym need it; run: pip install 'areal_actors[recipes]'") from None
    if name not in DATASETS:
        close = get_close_matches(name, DATASETS, n=1)
        advice = f"did you mean {close[0]}?" if close else f"it has {len(DATASETS)}, which its gallery shows."
        raise DatasetError(f"reasoning-gym has no generator {name!r}; {advice}")
    # reasoning-gym seeds problem n of seed s with s + n, so neighbouring seeds would share nearly all problems. The
    # spread seeds are below 2³¹.
    seed = int(np.random.SeedSequence(config.seed).generate_state(1)[0]) >> 1
    try:
        made = reasoning_gym.create_dataset(name, size=config.num_made, seed=seed, **config.options)
        return [dict(entry) for entry in made]
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise DatasetError(f"reasoning-gym cannot make {name!r} with {dict(config.options)}: {error}") from error


def _call(reference: str, function: Any, config: DatasetConfig) -> Rows:
    arguments = {"num": config.num_made, "seed": config.seed, **config.options}
    if not callable(function):
        raise DatasetError(f"{reference} is a {type(function).__name__}, not a function that returns problems.")
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise DatasetError(f"{reference}({', '.join(arguments)}) does not fit the function: {error}.") from None
    try:
        made: Any = function(**arguments)
        # Each is copied before the next is made: a generator may change and yield one dict again and again.
        return [_made_row(reference, number, row) for number, row in enumerate(islice(made, config.num_made))]
    except ArealError:
        raise
    except Exception as error:
        # The user's code may raise anything.
        raise DatasetError(f"{reference} raised {type(error).__name__}: {error}") from error


def _made_row(source: str, number: int, row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise DatasetError(f"{source} yields a {type(row).__name__} as problem {number}; each problem is a dict.")
    return plain_row(row, f"{source}, problem {number}")
