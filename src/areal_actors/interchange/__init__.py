"""Training rows as files for other programs: parquet dumps, and the formats of other trainers.

A run writes the rows of its steps as parquet (``logging.row_dumps``). ``export_rows`` converts them to what the loader
of another trainer reads. pyarrow and torch are loaded on first use.
"""

from __future__ import annotations

from areal_actors.interchange.formats import FORMATS, RowExport, export_rows, require_format
from areal_actors.interchange.rows import (
    INSTALL_PARQUET,
    DumpedRow,
    dump_path,
    dump_row,
    find_dumps,
    has_parquet,
    read_rows,
    write_rows,
)

__all__ = [
    "FORMATS",
    "INSTALL_PARQUET",
    "DumpedRow",
    "RowExport",
    "dump_path",
    "dump_row",
    "export_rows",
    "find_dumps",
    "has_parquet",
    "read_rows",
    "require_format",
    "write_rows",
]
