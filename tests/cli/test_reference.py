"""The page of commands is what the commands print."""

from tests.cli.reference import PAGE, format_page


def test_documentation_of_commands_is_current() -> None:
    """Write it again with ``python -m tests.cli.reference``."""
    assert PAGE.read_text(encoding="utf-8") == format_page()
