"""Shared parts of commands: their arguments and options, and how they exit on errors.

An error becomes one clear message, root cause first, and an exit code:

0 done · 1 the run failed · 2 the configuration or the command is wrong · 130 interrupted
"""

from __future__ import annotations

import errno
import functools
import logging
import sys
import traceback
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import click

from areal_actors.errors import ArealError, ConfigError, DatasetError, ModelError, WorkflowError


class ResumeMode(StrEnum):
    """When a run goes on where an earlier one of its name ended."""

    NEVER = "never"
    ALWAYS = "always"
    AUTO = "auto"
    """If there is something to go on from. This is for supervisors, whose command is the same at each start."""


class ResumableCommand(click.Command):
    """A command with ``--resume``, whose value can only follow ``=``: a word after it is an argument."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse ``args``, with a plain ``--resume`` spelt out."""
        plain = f"--resume={ResumeMode.ALWAYS.value}"
        return super().parse_args(ctx, [plain if word == "--resume" else word for word in args])


config_argument = click.argument("config", type=click.Path(path_type=Path))
overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
resume_option = click.option(
    "--resume",
    type=click.Choice([mode.value for mode in ResumeMode]),
    default=ResumeMode.NEVER.value,
    show_default=False,
    metavar="[=auto]",
    help="Go on from the last checkpoint of this run; with =auto, only if there is one, and begin otherwise.",
)
run_dir_option = click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the run is written, instead of <fileroot>/<experiment_name>/<trial_name>.",
)
json_option = click.option("--json", "is_json", is_flag=True, help="For programs: the results as one line of JSON.")
verbose_option = click.option("--verbose", is_flag=True, help="Log details, and show tracebacks.")


EXIT_FAILED = 1
EXIT_WRONG = 2
EXIT_INTERRUPTED = 130
_WRONG = (ConfigError, ModelError, DatasetError, WorkflowError)
"""Errors that the user can correct in the configuration."""


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors that the user can correct on the disk."""


def explains_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Replace tracebacks by messages, unless the user asked for them. Commands take ``verbose``."""

    @functools.wraps(command)
    def explained(*, verbose: bool, **options: Any) -> None:
        try:
            from areal_actors.lib.telemetry import logging_to_stream

            with logging_to_stream(level=logging.DEBUG if verbose else logging.INFO):
                command(**options)
        except click.exceptions.Exit:
            raise
        except BaseException as error:  # noqa: BLE001 - groups may contain an interrupt; the process exits in any case
            _exit_with(error, is_verbose=verbose)

    return explained


def _exit_with(error: BaseException, *, is_verbose: bool) -> NoReturn:
    """Print what went wrong, root cause first, and exit with its code."""
    from areal_actors.kernel.failure import root_cause
    from areal_actors.lib.task_groups import leaves
    from areal_actors.lib.telemetry import redact

    if is_verbose:
        click.echo(redact("".join(traceback.format_exception(error))), err=True)
    # In a class that a module being imported creates, an interrupt becomes the cause of a RuntimeError.
    if any(isinstance(found, KeyboardInterrupt) for leaf in leaves(error) for found in (leaf, leaf.__cause__)):
        click.echo("Interrupted.", err=True)
        sys.exit(EXIT_INTERRUPTED)
    cause = root_cause(error)
    if isinstance(cause, (click.ClickException, SystemExit)):
        raise cause
    click.echo(f"Error: {redact(_explain(cause, is_verbose=is_verbose))}", err=True)
    for other in [leaf for leaf in leaves(error) if leaf is not cause][:3]:
        click.echo(f"  also: {redact(_explain(other, is_verbose=True))}", err=True)
    sys.exit(EXIT_WRONG if isinstance(cause, _WRONG) else EXIT_FAILED)


def _explain(error: BaseException, *, is_verbose: bool) -> str:
    if isinstance(error, ArealError):
        return str(error)
    if isinstance(error, OSError) and error.errno in _DISK and not is_verbose:
        return f"{error.filename or 'A file'} cannot be written: {error.strerror}. Free space there, or set fileroot."
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if is_verbose else f"{text}\nThis was not foreseen; --verbose shows where it happened."
