"""The generated pages of the reference are current."""

import re

import pytest
from tests.cli.reference import PAGES, list_sections

from areal_actors.config import RunConfig, format_reference
from areal_actors.config.reference import paths_of


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_reference_page_is_current(path) -> None:
    """Write them again with ``python -m tests.cli.reference``."""
    assert path.read_text(encoding="utf-8") == PAGES[path].write(path)


def test_reference_has_every_setting() -> None:
    """Each setting that the command prints is a row in the table of its section."""
    text = format_reference(RunConfig)
    found = [
        f"{section.path}.{row.split('`')[1]}".lstrip(".") for section in list_sections(text) for row in section.rows
    ]

    assert set(found) <= set(paths_of(RunConfig))
    assert len(found) == len(set(found)) == len(re.findall(r"^\W*\w+:.*  # ", text, re.MULTILINE))
