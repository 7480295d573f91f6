"""``python -m tools.faults``: write ``docs/discussion/faults.md`` from the table of faults and what was measured."""

from __future__ import annotations

from tools.faults.page import PAGE, format_page, load_cells, load_seconds

if __name__ == "__main__":
    PAGE.write_text(format_page(load_cells(), load_seconds()), encoding="utf-8")
