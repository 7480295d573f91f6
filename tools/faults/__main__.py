"""``python -m tools.faults``: write ``docs/results/faults.md`` from the table of faults and what was measured."""

from __future__ import annotations

import sys

from tools.faults.page import NAMING, PAGE, ROOT, format_page, load_cells, load_seconds

if __name__ == "__main__":
    cells = load_cells()
    for name in sorted({cell.text for cell in cells if cell.kind in NAMING}):
        path, _, test = name.partition("::")
        if f"def {test.partition('[')[0]}(" not in (ROOT / path).read_text(encoding="utf-8"):
            sys.exit(f"there is no test {name}")
    PAGE.write_text(format_page(cells, load_seconds()), encoding="utf-8")
