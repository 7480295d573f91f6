"""Files of JSON lines that survive a crash: appended line by line without a buffer, truncated when a run resumes.

A killed process can leave a partial line at the end; readers skip it, and the next writer removes it. A full disk
leaves none: what could not be written completely is cut off again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Literal, TextIO

from areal_actors.lib.atomic_write import atomic_path
from areal_actors.lib.exact_json import load_json


class RecordFile:
    """A file of JSON lines to append to. The first record opens it; every line is written at once.

    A private file, which holds conversations, is readable only by its owner, whatever the umask.
    """

    def __init__(self, path: Path, *, is_private: bool = False) -> None:
        self.path = path
        self._mode = 0o600 if is_private else 0o666
        self._file: FileIO | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, or nothing. Raises ``OSError``."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_to_append(self.path, self._mode)
        _append(self._file, format_record(record))

    def close(self) -> None:
        """Close the file; a later record opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines to a file that only its owner can read: all of them, or none. Raises ``OSError``."""
    with _open_to_append(path, 0o600) as file:
        _append(file, "".join(lines))


def _open_to_append(path: Path, mode: int) -> FileIO:
    return FileIO(path, "a", opener=lambda name, flags: os.open(name, flags, mode))


def _append(file: FileIO, text: str) -> None:
    # Without a buffer: one whose contents a full disk refuses would write them later, twice, or never.
    data = memoryview(text.encode("utf-8", "backslashreplace"))
    size = file.seek(0, os.SEEK_END)
    try:
        while data:
            data = data[file.write(data) :]
    except OSError:
        # The next line must not continue a partial one. Cutting a file needs no space.
        with suppress(OSError):
            file.truncate(size)
        raise


def open_records(path: Path, mode: Literal["a", "w"]) -> TextIO:
    """Open a file of records for writing. Lone surrogates, which JSON allows and UTF-8 cannot encode, are escaped."""
    return path.open(mode, encoding="utf-8", errors="backslashreplace")


def format_record(record: Mapping[str, Any]) -> str:
    """Return one line of strict JSON. JSON has no nan or infinity, so they become null."""
    finite = _finite(record)
    line = json.dumps(finite, ensure_ascii=False, separators=(",", ":"), default=str) + "\n"
    try:
        line.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, such as in the message of an agent's error: a file has it as an escape only.
        return json.dumps(finite, separators=(",", ":"), default=str) + "\n"
    return line


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def load_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if the file is missing or holds anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, without a partial last line; none if there is no file. Raises ``OSError``."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from parse_records(file)


def parse_records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the records of lines, without those that are damaged or still growing."""
    for line in lines:
        try:
            record = load_json(line)
        except (ValueError, RecursionError):
            # It is four times as fast, but refuses nan and lone surrogates, which our files may have as escapes.
            try:
                record = json.loads(line.decode(errors="replace"))
            except (ValueError, RecursionError):
                continue
        if isinstance(record, dict):
            yield record


def rewrite_records(path: Path, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Keep the records for which ``keep`` is true, replacing the file atomically; return them. Raises ``OSError``."""
    kept = [record for record in read_records(path) if keep(record)]
    if path.exists():
        mode = path.stat().st_mode & 0o777
        with atomic_path(path, mode=mode, is_durable=True) as partial, open_records(partial, "w") as file:
            file.writelines(map(format_record, kept))
    return kept
