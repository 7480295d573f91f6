"""Compute the table, write it and its page, and fail if a default is biased: ``python -m tools.gradients``.

A directory as argument is written to in the place of ``docs/results``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tools.gradients.page import PAGE, format_page
from tools.gradients.table import FILE, compute_all, format_table, list_violations, parse_table


def main(arguments: list[str]) -> int:
    """Return 1 if a default is biased."""
    directory = Path(arguments[0]) if arguments else FILE.parent
    started = time.process_time()
    text = format_table(compute_all())
    seconds = time.process_time() - started
    table = parse_table(text)  # the page is that of the file
    (directory / FILE.name).write_text(text, encoding="utf-8")
    (directory / PAGE.name).write_text(format_page(table), encoding="utf-8")
    violations = list_violations(table)
    print(
        f"{sum(map(len, table.values()))} cells in {seconds:.0f} s of CPU, {len(violations)} defaults that are biased"
    )
    print("\n".join(violations))
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
