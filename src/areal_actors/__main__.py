"""The command line: ``areal-actors train``, ``serve``, ``export``, ``models``, ``report``, ``keys``, ``slurm``.

Everything heavy is imported by the command that needs it, so that ``--help`` is there at once. What training is, is
told in ``run``; here errors become one clear message and an exit code:

0 done · 1 the run failed · 2 the configuration or the command is wrong · 130 interrupted
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from areal_actors import __version__
from areal_actors.errors import ArealError, ConfigError, DatasetError, ModelError, WorkflowError

if TYPE_CHECKING:
    from areal_actors.dashboard import RunDirectory
    from areal_actors.messages import Endpoint
    from areal_actors.run.keys import KeyDoor
    from areal_actors.schedulers.slurm import JobRecord

__all__ = ["cli", "main"]

_EXIT_FAILED = 1
_EXIT_WRONG = 2
_EXIT_INTERRUPTED = 130
_WRONG = (ConfigError, ModelError, DatasetError, WorkflowError)
"""What a person mends in the configuration."""


def main() -> None:
    """Run the command line of this process."""
    cli(prog_name="areal-actors")


def _explains_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Let no traceback meet a person who did not ask for it. Commands take ``verbose``."""

    @functools.wraps(command)
    def explained(*, verbose: bool, **options: Any) -> None:
        try:
            from areal_actors.telemetry import logging_to_stream

            with logging_to_stream(level=logging.DEBUG if verbose else logging.INFO):
                command(**options)
        except click.exceptions.Exit:
            raise
        except BaseException as error:  # noqa: BLE001 - also groups with an interrupt in them; nothing is swallowed
            _exit_with(error, is_verbose=verbose)

    return explained


def _exit_with(error: BaseException, *, is_verbose: bool) -> NoReturn:
    """Say what went wrong, root cause first, and leave with its exit code."""
    from areal_actors.core.failure import leaves, root_cause
    from areal_actors.telemetry import redact

    if is_verbose:
        click.echo(redact("".join(traceback.format_exception(error))), err=True)
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error)):
        click.echo("Interrupted.", err=True)
        sys.exit(_EXIT_INTERRUPTED)
    cause = root_cause(error)
    if isinstance(cause, (click.ClickException, SystemExit)):
        raise cause
    click.echo(f"Error: {redact(_explain(cause, is_verbose=is_verbose))}", err=True)
    for other in [leaf for leaf in leaves(error) if leaf is not cause][:3]:
        click.echo(f"  also: {redact(_explain(other, is_verbose=True))}", err=True)
    sys.exit(_EXIT_WRONG if isinstance(cause, _WRONG) else _EXIT_FAILED)


def _explain(error: BaseException, *, is_verbose: bool) -> str:
    if isinstance(error, ArealError):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if is_verbose else f"{text}\nThis was not foreseen; --verbose shows where it happened."


_verbose = click.option("--verbose", is_flag=True, help="Log details, and show tracebacks.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="areal-actors")
def cli() -> None:
    """Train the model behind an agent with reinforcement learning, by changing the agent's base URL alone.

    \b
    Begin with:
      areal-actors train examples/tool_agent.yaml
      areal-actors train examples/tool_agent.yaml total_steps=5 rollout.group_size=4
    Then look at:
      runs/<experiment>/<trial>/report.html     the run on one page
      runs/<experiment>/<trial>/metrics.jsonl   the numbers of each step
    For agents that run elsewhere:
      areal-actors serve examples/serve.yaml
      areal-actors host examples/serve.yaml     the same for many users, each with a model of their own
    And to write a configuration of your own:
      areal-actors settings                     every setting, its default, what it is for
    """  # noqa: D301 - a real backspace tells click to keep the lines


@cli.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint of this run.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the run is written, instead of <fileroot>/<experiment_name>/<trial_name>.",
)
@_verbose
@_explains_errors
def train(*, config: Path, overrides: tuple[str, ...], resume: bool, run_dir: Path | None) -> None:
    """Train as the YAML file CONFIG says, with settings changed by KEY=VALUE.

    Values are YAML. Every mistake in the file and in the overrides is reported at once. Progress goes to standard
    error; the last line of standard output is one JSON object that sums the run up.

    \b
    Examples:
      areal-actors train my.yaml trainer.optimizer.learning_rate=1e-5 engine.device=cuda
      areal-actors train my.yaml 'rollout.openai={turn_discount: 0.9}' stop.reward=null
      areal-actors train my.yaml --resume

    Ctrl-C finishes the step, writes a checkpoint and stops; a second one stops at once. In both cases --resume goes on
    from the last checkpoint.
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.config import load_config

    loaded = load_config(config, overrides)
    from areal_actors.run import train as run_training

    summary = run_training(loaded, resume=resume, run_dir=run_dir)
    click.echo(json.dumps(summary.to_json()))


@cli.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint of this run.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the run is written, instead of <fileroot>/<experiment_name>/<trial_name>.",
)
@click.option("--json", "is_json", is_flag=True, help="Say where it listens as one line of JSON, for programs.")
@_verbose
@_explains_errors
def serve(*, config: Path, overrides: tuple[str, ...], resume: bool, run_dir: Path | None, is_json: bool) -> None:
    """Train on what agents elsewhere do, as the YAML file CONFIG says.

    Standard output says where to send agents, with a line to copy; its last line is one JSON object that sums the run
    up. The dataset of CONFIG is not used: agents bring their own problems, and say over HTTP what an answer was worth.

    \b
    Examples:
      areal-actors serve examples/serve.yaml
      areal-actors serve examples/serve.yaml proxy.port=8080 total_steps=100
      areal-actors serve examples/serve.yaml --resume

    Ctrl-C finishes the step, writes a checkpoint and stops; a second one stops at once. In both cases --resume goes on
    from the last checkpoint.
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.config import load_config

    loaded = load_config(config, overrides)
    from areal_actors.run import serve as run_service
    from areal_actors.run.serving import describe_service, format_service

    def announce(endpoint: Endpoint, directory: RunDirectory) -> None:
        click.echo((format_service if is_json else describe_service)(endpoint, directory))

    summary = run_service(loaded, resume=resume, run_dir=run_dir, announce=announce)
    click.echo(json.dumps(summary.to_json()))


@cli.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@_verbose
@_explains_errors
def host(*, config: Path, overrides: tuple[str, ...]) -> None:
    """Serve many users at one URL, each trial in a process of its own that is started on first use.

    The key of a user (areal-actors keys create USER --experiment NAME --trial NAME) decides which trial is trained, as
    CONFIG says, in <fileroot>/<experiment>/<trial>. What a host is, is in the section host of CONFIG.

    \b
    Examples:
      areal-actors host my.yaml
      areal-actors host my.yaml host.port=8080 host.max_services=8

    Ctrl-C stops all services, each with a checkpoint; a second one leaves at once. Started again, the host goes on with
    each service when somebody asks for it.
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.config import load_config

    loaded = load_config(config, overrides)
    from areal_actors.run.host import run_host

    run_host(loaded, announce=click.echo)


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@_verbose
@_explains_errors
def report(*, run_dir: Path) -> None:
    """Write the report and the learning curve of RUN_DIR again, from the files in it.

    \b
    Example:
      areal-actors report runs/tool_agent/trial
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.dashboard import RunDirectory, write_report

    click.echo(str(write_report(RunDirectory(path=run_dir))))


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@_verbose
@_explains_errors
def export(*, run_dir: Path) -> None:
    """Write RUN_DIR/weights from the newest checkpoint of a run that has not finished.

    A run that finishes writes its weights itself. The directory appears whole or not at all; transformers and inference
    servers load it as it is.

    \b
    Example:
      areal-actors export runs/tool_agent/trial
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.run.exporting import export_run

    found = export_run(run_dir)
    click.echo(json.dumps({"model": found.name, "step": found.step, "path": str(found.path)}))


@cli.command()
@click.option(
    "--fileroot",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Where runs are written.",
)
@_verbose
@_explains_errors
def models(*, fileroot: Path) -> None:
    """List the models that runs have trained, with their steps, dates and rewards.

    A name is what an agent sends as its model to a service that is running, and what RemoteSGLangEngine takes.

    \b
    Example:
      areal-actors models --fileroot runs
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.models import Catalogue, format_models

    click.echo(format_models(Catalogue(root=fileroot).list()))


@cli.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--submit", is_flag=True, help="Try a job of each role on the cluster, and wait for it.")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object per check.")
@_verbose
@_explains_errors
def doctor(*, config: Path, overrides: tuple[str, ...], submit: bool, is_json: bool) -> None:
    """Look whether the job of the YAML file CONFIG can run here, before it waits in a queue.

    It looks at packages, the model, problems, the agent, the run directory, ports, devices, inference servers and the
    cluster, as far as CONFIG uses them, and says what to do about what it finds. It starts nothing that lasts. The exit
    code is 1 if the job could not run.

    \b
    Example:
      areal-actors doctor examples/tool_agent.yaml
      areal-actors doctor examples/slurm.yaml --submit
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.config import load_config
    from areal_actors.run.doctor import Verdict, examine, format_finding

    verdicts = set()
    for finding in examine(load_config(config, overrides), has_trial=submit):
        click.echo(finding.to_json() if is_json else format_finding(finding))
        verdicts.add(finding.verdict)
    if Verdict.FAILED in verdicts:
        sys.exit(_EXIT_FAILED)


@cli.command()
@click.argument("section", required=False)
@_verbose
@_explains_errors
def settings(*, section: str | None) -> None:
    """Print every setting as commented YAML: what it must be, its default, what its section is for.

    \b
    Examples:
      areal-actors settings
      areal-actors settings trainer.objective
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.config import format_reference, settings_class

    click.echo(format_reference(settings_class(section or "")), nl=False)


@cli.command()
@click.argument("proxies", nargs=-1, required=True, metavar="NAME=URL...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, show_default=True, help="Port to listen on; 0 takes any free one.")
@_verbose
@_explains_errors
def entry(*, proxies: tuple[str, ...], host: str, port: int) -> None:
    """Stand before several services as one URL; each session stays at the service where it was started.

    NAME is the service's own name, its setting sessions.home. Ctrl-C stops when what is in flight is answered.

    \b
    Example:
      areal-actors serve a.yaml sessions.home=a proxy.port=8001
      areal-actors serve b.yaml sessions.home=b proxy.port=8002
      areal-actors entry a=http://127.0.0.1:8001 b=http://127.0.0.1:8002
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.run.entry import parse_backends, run_entry

    run_entry(parse_backends(proxies), host=host, port=port, announce=click.echo)


# -------------------------------------------------------------------------------------------------- keys of users


_STORE = Path("runs/keys.sqlite")
_door = (
    click.option(
        "--store",
        type=click.Path(path_type=Path, dir_okay=False),
        default=_STORE,
        show_default=True,
        help="The file of keys: users.path of the configuration, or keys.sqlite in fileroot.",
    ),
    click.option("--url", help="A running service to ask instead; its admin key is needed then."),
    click.option("--admin-key", envvar="AREAL_ADMIN_KEY", help="Better given as AREAL_ADMIN_KEY in the environment."),
)


def _has_door(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say where keys are kept; it takes ``door`` for them."""

    @functools.wraps(command)
    def opened(*, store: Path, url: str | None, admin_key: str | None, **options: Any) -> None:
        from areal_actors.run.keys import open_keys

        command(door=open_keys(store=store, url=url, admin_key=admin_key), **options)

    for option in reversed(_door):
        opened = option(opened)
    return opened


@cli.group()
def keys() -> None:
    """Give users keys of their own, with quotas, and take them back.

    The file of keys may be used while a service on this machine uses it: a new key works at once, and a revoked one
    stops within a second. With --url a running service is asked, from wherever it can be reached.
    """


@keys.command("create")
@click.argument("user")
@click.option("--experiment", help="What the user's sessions belong to.")
@click.option("--trial", help="What the user's sessions belong to.")
@click.option("--max-sessions", type=click.IntRange(min=0), help="Sessions that are live at once.")
@click.option("--requests-per-minute", type=click.IntRange(min=0), help="Requests for completions in any 60 seconds.")
@click.option("--tokens-per-day", type=click.IntRange(min=0), help="Sampled tokens from midnight to midnight, UTC.")
@click.option("--expires", metavar="TIME", help="When the key ends, as ISO 8601: 2027-01-31 or 2027-01-31T12:00+01:00.")
@_verbose
@_explains_errors
@_has_door
def create_user_key(
    *, door: KeyDoor, requests_per_minute: int | None, tokens_per_day: int | None, expires: str | None, **fields: Any
) -> None:
    """Issue a key to USER, who need not be known. It is printed this once, and cannot be read again.

    Quotas are the user's, for all keys together: what is named here replaces what was.

    \b
    Examples:
      areal-actors keys create ada --max-sessions 20 --tokens-per-day 1000000
      OPENAI_API_KEY=$(areal-actors keys create ada --url http://trainer:8080)
    """  # noqa: D301 - a real backspace tells click to keep the lines
    limits = {"max_requests_per_minute": requests_per_minute, "max_tokens_per_day": tokens_per_day}
    created = door.create({**fields, **limits, "expires_at": expires})
    click.echo(f"{created['id']} of {created['user']}; this is the only time that it is shown:", err=True)
    click.echo(created["key"])


@keys.command("list")
@_verbose
@_explains_errors
@_has_door
def list_keys(*, door: KeyDoor) -> None:
    """List every key: whose it is, what the user may use and has used today, and whether it is valid."""
    from areal_actors.run.keys import format_keys

    click.echo(format_keys(door.list()))


@keys.command("revoke")
@click.argument("key_id")
@_verbose
@_explains_errors
@_has_door
def revoke_key(*, door: KeyDoor, key_id: str) -> None:
    """Revoke the key KEY_ID (key_…, as it is listed), and close the sessions that it has started."""
    revoked = door.revoke(key_id)
    click.echo(f"{revoked['id']} of {revoked['user']} is revoked.")


# ---------------------------------------------------------------------------------------------- jobs on a cluster


_runs = click.argument(
    "directory", type=click.Path(path_type=Path, file_okay=False, exists=True), default=Path("runs"), required=False
)
_as_json = click.option("--json", "is_json", is_flag=True, help="For programs: one JSON document.")


@cli.group()
def slurm() -> None:
    """Look after the jobs that runs have on a Slurm cluster.

    DIRECTORY is that of a run, or one with runs below it, such as the setting fileroot. A run ends its jobs itself;
    these commands are for what a run has left that was killed, or whose cluster did not answer.
    """


@slurm.command("status")
@_runs
@_as_json
@_verbose
@_explains_errors
def show_jobs(*, directory: Path, is_json: bool) -> None:
    """List the jobs of DIRECTORY, and how they fare.

    \b
    Examples:
      areal-actors slurm status runs/sums/trial
      areal-actors slurm status --json
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.run.slurm import format_jobs, format_json, list_known_jobs

    jobs = list_known_jobs(directory)
    click.echo(format_json(jobs) if is_json else format_jobs(jobs))


@slurm.command("cancel")
@_runs
@_as_json
@_verbose
@_explains_errors
def cancel_jobs_of(*, directory: Path, is_json: bool) -> None:
    """End every job of DIRECTORY, also of runs that live, and wait until they are gone. Again is fine."""
    from areal_actors.run.slurm import cancel_jobs

    _tell_ended(cancel_jobs(directory), is_json=is_json)


@slurm.command("reap")
@_runs
@_as_json
@_verbose
@_explains_errors
def reap_jobs_of(*, directory: Path, is_json: bool) -> None:
    """End the jobs that killed runs in DIRECTORY have left, and wait until they are gone. Runs that live are safe."""
    from areal_actors.run.slurm import reap_jobs

    _tell_ended(reap_jobs(directory), is_json=is_json)


def _tell_ended(records: tuple[JobRecord, ...], *, is_json: bool) -> None:
    if is_json:
        click.echo(json.dumps([{"name": one.name, "worker": one.worker, "job": one.job} for one in records]))
    else:
        said = ", ".join(f"{one.job or one.name} ({one.worker})" for one in records)
        click.echo(f"Ended: {said}." if records else "There was nothing to end.")


if __name__ == "__main__":
    main()
