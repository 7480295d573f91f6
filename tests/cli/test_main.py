"""The command line: what it teaches, what it prints, and how it fails."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from tests.stacks.run_files import write_run

from areal_actors import __version__
from areal_actors.cli import cli
from areal_actors.dashboard import MetricsWriter, RunDirectory, RunSummary
from areal_actors.dashboard.run_record import RunRecord, write_record
from areal_actors.domain import RunStatus
from areal_actors.errors import CheckpointError, ConfigError, ModelError, RunDirectoryError
from areal_actors.messages import StepFinished

CONFIG = """
experiment_name: sums
total_steps: 3
model: tiny
dataset: {jsonl: problems.jsonl}
rollout: {workflow: "agent.py:Agent"}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def run(monkeypatch):
    """Puts a function in place of training, which is tested elsewhere, and gives what it was called with."""

    def place(behaviour):
        calls = []

        def train(config, *, resume, run_dir):
            calls.append((config, resume, run_dir))
            return behaviour(config)

        module = ModuleType("areal_actors.run.training")
        module.train = train
        monkeypatch.setitem(sys.modules, "areal_actors.run.training", module)
        return calls

    return place


EXAMPLES = Path(__file__).parents[2] / "examples"


def invoke(*arguments):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def summary(config):
    """The summary of a run that went well."""
    return RunSummary(
        steps=3,
        reward_first=0.1,
        reward_last=0.9,
        eval_first=0.2,
        eval_last=0.8,
        seconds=12.5,
        run_dir=config.run_directory.path,
        version=3,
        model="sums/trial",
    )


def failing(error):
    def behaviour(_config):
        raise error

    return behaviour


def test_train_prints_a_json_summary_last(config, run, tmp_path):
    """With the promised keys, alone on standard output."""
    calls = run(summary)

    result = invoke("train", config, "seed=7", f"fileroot={tmp_path}/out")

    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "steps": 3,
        "reward_first": 0.1,
        "reward_last": 0.9,
        "eval_first": 0.2,
        "eval_last": 0.8,
        "seconds": 12.5,
        "run_dir": f"{tmp_path}/out/sums/trial",
        "version": 3,
        "model": "sums/trial",
        "verdict": None,
    }
    ((loaded, resume, run_dir),) = calls
    assert (loaded.seed, resume, run_dir) == (7, False, None)


def test_train_passes_options_to_the_run(config, run, tmp_path):
    """Resuming, and another directory."""
    calls = run(summary)

    invoke("train", config, "--resume", "--run-dir", tmp_path / "there")

    assert calls[0][1:] == (True, tmp_path / "there")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError(("a is wrong", "b too")), 2, ["2 mistakes in the configuration:", "a is wrong", "b too"]),
        (ModelError("There is no model 'tniy'"), 2, ["There is no model 'tniy'"]),
        (CheckpointError("disk full"), 1, ["disk full"]),
        (RunDirectoryError("metrics.jsonl could not be written"), 1, ["could not be written"]),
        (
            OSError(errno.ENOSPC, "No space left on device", "x/report.html"),
            1,
            ["x/report.html cannot be written", "space"],
        ),
        (ZeroDivisionError("division by zero"), 1, ["ZeroDivisionError: division by zero", "--verbose"]),
        (
            ExceptionGroup("x", [ExceptionGroup("y", [CheckpointError("the cause"), KeyError("k")])]),
            1,
            ["the cause", "also"],
        ),
        (KeyboardInterrupt(), 130, ["Interrupted."]),
        (BaseExceptionGroup("x", [KeyboardInterrupt(), ValueError()]), 130, ["Interrupted."]),
    ],
)
def test_errors_are_printed_root_cause_first(config, run, error, code, words):
    """Root cause first, an exit code that says whose fault it is, no traceback, nothing on standard output."""
    run(failing(error))

    result = invoke("train", config)

    assert result.exit_code == code
    assert all(word in result.stderr for word in words)
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_verbose_prints_tracebacks(config, run):
    """The traceback comes before the message."""
    run(failing(ZeroDivisionError("division by zero")))

    result = invoke("train", config, "--verbose")

    assert "Traceback" in result.stderr
    assert result.stderr.rstrip().endswith("Error: ZeroDivisionError: division by zero")


def test_errors_redact_secrets(config, run):
    """An error that quotes a session's URL quotes no key."""
    token = "AbCdEfGhIjKlMnOpQrStUv"
    run(failing(CheckpointError(f"http://127.0.0.1:1/train-1-{token}/v1 failed")))

    assert token not in invoke("train", config, "--verbose").stderr


def test_configuration_is_checked_before_the_model_loads(config, run):
    """All at once, exit code 2."""
    calls = run(summary)

    result = invoke("train", config, "trainer.layuot=flat", "nonsense")

    assert result.exit_code == 2
    assert "2 mistakes in the configuration" in result.stderr
    assert calls == []


def test_resume_option_has_three_modes(run, config, tmp_path):
    """``--resume`` may stand before the configuration; only ``=auto`` depends on what is on the disk."""
    calls = run(summary)
    ways = ([], ["--resume"], ["--resume=auto"])
    for words in ways:
        assert 0 == invoke("train", *words, config, "--run-dir", tmp_path / "there").exit_code
    (tmp_path / "there" / "checkpoints" / "step-3").mkdir(parents=True)
    for words in ways:
        assert 0 == invoke("train", *words, config, "--run-dir", tmp_path / "there").exit_code

    assert [False, True, False, False, True, True] == [is_resumed for _, is_resumed, _ in calls]


@pytest.mark.parametrize("command", ["serve", "host"])
@pytest.mark.parametrize(
    "environment",
    [{"AREAL_ADMIN_KEY": " "}, {"AREAL_ADMIN_KEY_FILE": "absent/key"}, {"AREAL_ADMIN_KEY_FILE": sys.executable}],
)
def test_unreadable_admin_key_is_refused(config, monkeypatch, command, environment):
    """Before anything is started."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = invoke(command, config)

    assert 2 == result.exit_code
    assert next(iter(environment)) in result.output


def test_admin_key_is_read_from_the_environment(run, config, tmp_path, monkeypatch):
    """From a variable, else from a file. One of the configuration has priority, and no key is on the command line."""
    calls = run(summary)
    module = sys.modules["areal_actors.run.training"]
    keys = []

    def serve(given, **options):
        keys.append(options["admin_key"])
        return module.train(given, resume=options["resume"], run_dir=None)

    serving = ModuleType("areal_actors.run.serving")
    serving.serve = serve
    serving.describe_service = serving.format_service = None
    monkeypatch.setitem(sys.modules, "areal_actors.run.serving", serving)
    (tmp_path / "key").write_text("from-file\n")
    monkeypatch.setenv("AREAL_ADMIN_KEY_FILE", str(tmp_path / "key"))
    assert 0 == invoke("serve", config).exit_code
    monkeypatch.setenv("AREAL_ADMIN_KEY", "from-variable")
    assert 0 == invoke("serve", config).exit_code
    assert 0 == invoke("serve", config, "proxy.admin_key=own").exit_code

    # Not in the configuration, which is written to config.yaml and to the backups of the run.
    assert ["from-file", "from-variable", "from-variable"] == keys
    assert [None, None, "own"] == [given.proxy.admin_key for given, _, _ in calls]


def test_runs_command_lists_states_and_notes(tmp_path):
    """As a table and as JSON: finished, failed, killed, of an earlier version, and one that could not begin."""
    for name, status, reason in (
        ("a", RunStatus.FINISHED, None),
        ("b", RunStatus.FAILED, "no room"),
        ("c", RunStatus.RUNNING, None),
        ("d", None, None),
    ):
        directory = write_run(tmp_path / "runs" / name)
        if status is not None:
            write_record(directory, RunRecord(status=status, reason=reason))

    could_not_begin = tmp_path / "runs" / "e"
    (could_not_begin / "logs").mkdir(parents=True)
    (could_not_begin / "config.yaml").touch()
    damaged = RunDirectory(path=tmp_path / "runs" / "a").metrics
    damaged.write_text(damaged.read_text() + '{"step": "x"}\n{"step": 4, "reward": "y"}\n{"step": null}\n[1]\n{"st')

    shown = invoke("runs", tmp_path / "runs").stdout
    records = [json.loads(line) for line in invoke("runs", tmp_path / "runs", "--json").stdout.splitlines()]

    assert ["finished", "failed", "killed", "unknown", "not begun"] == [record["status"] for record in records]
    assert [3, 3, 3, 3, 0] == [record["steps"] for record in records]
    assert "no room" in shown
    assert "0.100 -> 0.300" in shown
    assert 1 == invoke("runs", tmp_path / "absent").exit_code


def test_report_command_writes_the_page(tmp_path):
    """It prints the page's path; a directory without a run is an error."""
    directory = RunDirectory(path=tmp_path / "sums" / "trial")
    writer = MetricsWriter(directory.metrics)
    writer.open()
    writer.on_event(StepFinished(step=1, metrics={"step": 1, "version": 1, "reward": 0.5}))
    writer.close()

    assert invoke("report", directory.path).stdout.strip() == str(directory.report)
    assert directory.report.exists()
    assert invoke("report", tmp_path).exit_code == 1


def test_settings_command_prints_sections():
    """Those that most runs need, all of them, or one section; a misspelt section names the nearest."""
    short, full = invoke("settings").stdout, invoke("settings", "--all").stdout
    assert "experiment_name:" in short
    assert "learning_rate:" in short
    assert ("weight_decay:" in short, "weight_decay:" in full) == (False, True)
    assert "learning_rate" in invoke("settings", "trainer.optimizer").stdout
    result = invoke("settings", "trainer.optimzer")
    assert (result.exit_code, "did you mean trainer.optimizer?" in result.stderr) == (2, True)


@pytest.mark.parametrize("arguments", [(), ("train",), ("report",), ("settings",)])
def test_help_has_examples(arguments):
    """Every command shows an example that can be copied."""
    result = invoke(*arguments, "--help")

    assert result.exit_code == 0
    assert "areal-actors " in result.stdout.partition("\n")[2]


def test_help_imports_no_torch():
    """A real process shows its help and its version without torch, starlette, or the settings."""
    code = (
        "import sys, runpy\n"
        "sys.argv = ['areal-actors', '--help']\n"
        "try:\n    runpy.run_module('areal_actors', run_name='__main__')\n"
        "except SystemExit as leaving:\n    assert not leaving.code\n"
        "heavy = {'torch', 'transformers', 'starlette', 'hypercorn', 'matplotlib', 'numpy', 'areal_actors.config'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    version = subprocess.run(
        [sys.executable, "-m", "areal_actors", "--version"], capture_output=True, text=True, check=True
    ).stdout

    assert shown.rstrip().endswith("[]")
    assert "areal-actors train examples/" in shown
    assert __version__ in version


@pytest.mark.parametrize(
    ("loaded", "inherited"),
    [("click.core", signal.default_int_handler), ("areal_actors.config", signal.SIG_IGN)],
    ids=["terminal", "background"],
)
def test_interrupt_during_imports_prints_no_traceback(tmp_path, loaded, inherited):
    """Real processes, each interrupted as soon as a module is loaded: 130, one line, and nothing on the disk.

    A script starts background jobs with SIGINT ignored, which is the signal that ends a run nevertheless.
    """
    words = ("train", "tiny.yaml", "--run-dir", str(tmp_path / "run"))
    before = signal.signal(signal.SIGINT, inherited)
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "areal_actors", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=EXAMPLES,
    )
    signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    assert any(line.endswith(f" {loaded}\n") for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)

    said = "".join(line for line in said.splitlines(keepends=True) if not line.startswith("import time:"))
    assert (process.returncode, said) == (130, "Interrupted.\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["a"], "write NAME=URL"),
        (["a=http://x", "a=http://y"], "given twice"),
        (["A=http://x"], "small letters"),
        (["a=x"], "must be a URL"),
    ],
)
def test_entry_command_refuses_invalid_proxies(words, complaint):
    """Before it listens."""
    result = CliRunner().invoke(cli, ["entry", *words])

    assert 2 == result.exit_code
    assert complaint in result.output
