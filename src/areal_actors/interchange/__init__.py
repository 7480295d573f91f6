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
from areal_actors.interchange.seals import changed_columns, open_seal_key, read_seal_key, seal_row

__all__ = [
    "FORMATS",
    "INSTALL_PARQUET",
    "DumpedRow",
    "RowExport",
    "changed_columns",
    "dump_path",
    "dump_row",
    "export_rows",
    "find_dumps",
    "has_parquet",
    "open_seal_key",
    "read_rows",
    "read_seal_key",
    "require_format",
    "seal_row",
    "write_rows",
]
