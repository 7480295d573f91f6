"""The configuration of a run: loading, overriding, saving, and every mistake at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plugins import needs_plugin

from areal_actors.config import (
    AgentMode,
    RunConfig,
    create_config,
    format_reference,
    load_config,
    save_config,
    settings_class,
)
from areal_actors.config.documents import format_yaml, parse_yaml
from areal_actors.config.reference import paths_of
from areal_actors.errors import ConfigError
from areal_actors.lib.plugins import PluginGroup
from areal_actors.sandbox import SandboxConfig
from areal_actors.workflows import CommandConfig

MINIMAL: dict[str, Any] = {
    "experiment_name": "sums",
    "total_steps": 3,
    "model": "tiny",
    "dataset": {"jsonl": "problems.jsonl"},
    "rollout": {"workflow": "agent.py:Agent"},
}
_NOT_ALONE = ("rollout.workflow.", "scheduler.slurm.container.")  # in place of a text; one of two classes
PATHS = sorted(path for path in paths_of(RunConfig) if not path.startswith(_NOT_ALONE))


@pytest.fixture
def write(tmp_path):
    """Writes settings beside the minimal ones into a file."""

    def write(text: str = "", **settings: Any) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(format_yaml(MINIMAL | settings) + text)
        return path

    return write


def values(kind: Any) -> st.SearchStrategy[Any]:  # noqa: PLR0911 - one line for each kind of type
    """Plain values of a type that validators may or may not like."""
    origin, arguments = get_origin(kind), get_args(kind)
    if attrs.has(kind):
        return sections(kind)
    if origin is Literal:
        return st.sampled_from(arguments)
    if hasattr(kind, "__supertype__"):
        return st.text(min_size=1, max_size=8)
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=2)
    if origin is not None and origin.__name__ == "Mapping":
        return st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4), max_size=2)
    if origin is not None:
        return st.one_of([values(argument) for argument in arguments])
    if hasattr(kind, "__members__"):
        return st.sampled_from([member.value for member in kind])
    return {
        bool: st.booleans(),
        int: st.integers(1, 9),
        float: st.floats(0.01, 0.9),
        str: st.sampled_from(["individual", "mean", "auto", "a"]),
        Path: st.just("some/path"),
        type(None): st.none(),
    }[kind]


def sections(cls: type) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the settings of a class."""
    fields = attrs.fields(attrs.resolve_types(cls))
    return st.fixed_dictionaries({}, optional={field.alias: values(field.type) for field in fields})


@given(sections(RunConfig))
def test_saved_configuration_loads_equal(tmp_path_factory, settings):
    """Any configuration that is accepted is the same after ``save_config`` and ``load_config``."""
    rollout = MINIMAL["rollout"] | settings.pop("rollout", {})
    try:
        config = create_config(MINIMAL | settings | {"rollout": rollout, "dataset": MINIMAL["dataset"]})
    except ConfigError:
        return
    path = tmp_path_factory.mktemp("saved") / "config.yaml"
    save_config(config, path)

    assert load_config(path) == load_config(str(path)) == config


@given(st.sampled_from(PATHS), st.data())
def test_misspelt_setting_is_reported_with_its_path(tmp_path_factory, path, data):
    """Whichever setting is misspelt, the message has its whole path and the right name."""
    section, _, name = path.rpartition(".")
    position = data.draw(st.integers(1, len(name)))
    misspelt = name[:position] + "x" + name[position:]
    dotted = f"{section}.{misspelt}" if section else misspelt
    file = tmp_path_factory.mktemp("misspelt") / "run.yaml"
    file.write_text(format_yaml(MINIMAL))

    with pytest.raises(ConfigError) as caught:
        load_config(file, [f"{dotted}=1"])

    found = [problem for problem in caught.value.problems if f" {dotted} is not a setting" in problem]
    assert found
    assert f"command line, {dotted}=1:" in found[0]
    assert name in found[0]


def test_all_mistakes_are_reported_at_once_with_their_lines(write):
    """File and command line, unknown keys and wrong values: one list, each with where it was made."""
    path = write("engine:\n  dtype: float16\nsteps: 3\ngroup_size: 4\n", batch_size=0)

    with pytest.raises(ConfigError) as caught:
        load_config(path, ["trainer.layuot=flat", "seed=one", "nonsense"])

    text = str(caught.value)
    for words in (
        "command line: 'nonsense' is not an override",
        "command line, trainer.layuot=flat: trainer.layuot is not a setting; did you mean layout?",
        "command line, seed=one: seed must be a whole number, not 'one'",
        f"{path}:10: engine.dtype must be one of auto, float32, bfloat16, not 'float16'; did you mean bfloat16?",
        "group_size is not a setting; did you mean rollout.group_size?",
        "batch_size must be >= 1, not 0",
    ):
        assert words in text
    assert text.startswith("7 mistakes in the configuration:")


def test_empty_file_reports_required_settings(tmp_path):
    """Each required setting by name."""
    path = tmp_path / "empty.yaml"
    path.touch()

    with pytest.raises(ConfigError) as caught:
        load_config(path)

    missing = {problem.split()[1] for problem in caught.value.problems}
    assert missing == {"experiment_name", "total_steps", "model"}


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "just text", "3"])
def test_file_without_a_mapping_is_refused(tmp_path, text):
    """With an example of what it should hold."""
    path = tmp_path / "list.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match="must hold sections and settings"):
        load_config(path)


def test_override_has_the_meaning_of_the_file(write):
    """Values are YAML; a later override wins; sections are made, merged key by key, or replaced as a whole."""
    path = write(rollout=MINIMAL["rollout"] | {"openai": {"turn_discount": 0.5}})

    config = load_config(
        path,
        [
            "rollout.group_size=2",
            "rollout.group_size=4",
            "trainer.optimizer.learning_rate=1e-5",
            "rollout.workflow_kwargs.max_turns=3",
            "rollout.openai.export_style=concat",
            "engine={max_length: 64}",
            "stop.reward=null",
            "trial_name='7'",
        ],
    )

    assert config.rollout.group_size == 4
    assert config.trainer.optimizer.learning_rate == 1e-5
    assert config.rollout.workflow_kwargs == {"max_turns": 3}
    assert (config.rollout.openai.turn_discount, config.rollout.openai.export_style) == (0.5, "concat")
    assert config.engine.max_length == 64
    assert config.trial_name == "7"


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("seed.x=1", "seed.x cannot be set: seed is 5 and has no parts"),
        ("proxy.inert_parameters.0=a", "cannot be set: proxy.inert_parameters is ['x', 'y'] and has no parts"),
        ("=3", "'=3' is not an override"),
        ("rollout..group_size=3", "is not an override"),
        ("engine={", "is not valid YAML"),
    ],
)
def test_override_of_an_unknown_path_is_refused(write, override, text):
    """The way stops where there is nothing below."""
    path = write(seed=5, proxy={"inert_parameters": ["x", "y"]})

    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert text in str(caught.value)


def test_alias_of_a_setting_is_accepted(write):
    """``rollout.agent`` is ``rollout.openai``, in the file and on the command line."""
    path = write("training:\n  layout: flat\n", rollout=MINIMAL["rollout"] | {"agent": {"turn_discount": 0.5}})

    config = load_config(path, ["rollout.agent.export_style=concat", "rollout.tokenizer_path=other"])

    assert config.trainer.layout == "flat"
    assert (config.rollout.openai.turn_discount, config.rollout.openai.export_style) == (0.5, "concat")
    assert config.tokenizer == "other"


def test_setting_and_its_alias_together_are_refused(write):
    """Which of them is meant cannot be known."""
    path = write("training: {layout: flat}\ntrainer: {layout: tree}\n")

    with pytest.raises(ConfigError, match="training is another name of trainer, which is given too"):
        load_config(path)


def test_mistake_under_an_alias_has_its_line(write):
    """The line is the one where the file has it."""
    path = write("training:\n  layout: flt\n")
    num_lines = len(path.read_text().splitlines())

    with pytest.raises(ConfigError, match=rf"run.yaml:{num_lines}: trainer.layout must be one of auto, flat, tree"):
        load_config(path)


def test_relative_path_is_relative_to_its_file(write, tmp_path, monkeypatch):
    """Those of the command line belong to the working directory; names of models and modules are not paths."""
    (tmp_path / "model").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    path = write(fileroot="out", model="model", tokenizer="smollm2-135m-instruct")

    config = load_config(path, ["eval_dataset={python: 'mine.py:problems'}"])

    assert config.fileroot == tmp_path / "out"
    assert config.model == str(tmp_path / "model")
    assert config.tokenizer == "smollm2-135m-instruct"
    assert config.rollout.workflow == f"{tmp_path}/agent.py:Agent"
    assert config.dataset.jsonl == str(tmp_path / "problems.jsonl")
    assert config.eval_dataset is not None
    assert config.eval_dataset.python == f"{elsewhere}/mine.py:problems"
    assert load_config(path, ["rollout.workflow=package.module.Agent"]).rollout.workflow == "package.module.Agent"


@pytest.mark.parametrize("model", ["m" * 5000, "a\0b", "org/name"])
def test_model_name_may_be_any_text(write, model):
    """Whether there is such a model is found out later, by those who know models."""
    assert load_config(write(model=model)).model == model


def test_experiment_name_that_is_no_directory_is_refused(write):
    """They become directories and parts of URLs."""
    with pytest.raises(ConfigError, match="experiment_name"):
        load_config(write(experiment_name="../escape"))


def test_reference_loads_when_required_settings_are_filled_in():
    """Every setting is in it, with its default."""
    text = format_reference(RunConfig)
    data = parse_yaml(text, source="reference").data

    given = {key: value for key, value in data.items() if key not in {"eval_dataset", "tokenizer"}}
    given |= {"experiment_name": "sums", "total_steps": 3, "model": "tiny", "dataset": MINIMAL["dataset"]}
    given["rollout"]["workflow"] = "agent.py:Agent"
    assert create_config(given) == create_config(MINIMAL)


def test_section_is_found_by_its_path():
    """``areal-actors settings trainer.optimizer`` shows that section; a wrong one names the nearest."""
    assert "learning_rate" in format_reference(settings_class("trainer.optimizer"))
    assert settings_class("rollout.agent") is settings_class("rollout.openai")
    with pytest.raises(ConfigError, match=r"trainer.optimiser is not a section; did you mean trainer.optimizer\?"):
        settings_class("trainer.optimiser")
    for setting, section in (("trainer.layout", "trainer"), ("total_steps", "--all")):
        with pytest.raises(ConfigError, match=f"{setting} is a setting, .*; areal-actors settings {section} explains"):
            settings_class(setting)


def test_workflow_may_be_a_command(write, tmp_path):
    """A word that names a file beside the configuration is that file; the rest is as it was written, and comes back."""
    (tmp_path / "agent.py").touch()
    path = write(rollout={"workflow": {"command": ["python", "agent.py", "--steps", "3"]}})
    config = load_config(path)
    save_config(config, tmp_path / "saved.yaml")

    assert config.rollout.workflow == CommandConfig(command=("python", str(tmp_path / "agent.py"), "--steps", "3"))
    assert load_config(tmp_path / "saved.yaml") == config


@needs_plugin(PluginGroup.SANDBOXES, "bubblewrap")
def test_section_with_a_short_form_may_be_a_word(write, tmp_path):
    """``sandbox: bubblewrap`` names its backend; a misspelt one is told the nearest, and limits need a backend."""
    short = load_config(write(rollout={"workflow": "agent.py:Agent", "agent": {"sandbox": "bubblewrap"}}))
    section = load_config(write(), ["rollout.openai.sandbox={backend: bubblewrap, readable: [data]}"])

    assert short.rollout.openai.sandbox == SandboxConfig(backend="bubblewrap")
    assert section.rollout.openai.sandbox.readable == (Path.cwd() / "data",)
    with pytest.raises(ConfigError, match=r"rollout.openai.sandbox.backend .*did you mean bubblewrap\?"):
        load_config(write(), ["rollout.openai.sandbox=bubblewarp"])
    with pytest.raises(ConfigError, match="without a sandbox, nothing enforces memory_mib; name a backend: bubblewrap"):
        load_config(write(), ["rollout.openai.sandbox.memory_mib=100"])
    with pytest.raises(ConfigError, match="the sandbox docker needs an image"):
        load_config(write(), ["rollout.openai.sandbox=docker"])


@pytest.mark.parametrize(
    ("workflow", "complaint"),
    [
        ({"command": []}, "rollout.workflow.command"),
        ({"comand": ["sh"]}, "rollout.workflow.comand is not a setting; did you mean command?"),
        (
            3,
            "must be text or a section \\(command, grader, files\\) or a section .+ or null, not 3",
        ),
    ],
    ids=["empty", "misspelt", "number"],
)
def test_invalid_command_is_refused(write, workflow, complaint):
    """With its path."""
    with pytest.raises(ConfigError, match=complaint):
        load_config(write(rollout={"workflow": workflow}))


@pytest.mark.parametrize("section", ["openai", "agent"])
@pytest.mark.parametrize("mode", ["subprocess", "subproc"])
def test_agent_mode_subproc_is_an_alias(write, section, mode):
    """And its section, too."""
    config = load_config(write(rollout=MINIMAL["rollout"] | {section: {"mode": mode, "subproc_max_workers": 2}}))

    assert (AgentMode.SUBPROCESS, 2) == (config.rollout.openai.mode, config.rollout.openai.subproc_max_workers)


def test_unknown_agent_mode_is_refused(write):
    """With the nearest one."""
    with pytest.raises(ConfigError, match=r"must be one of inline, subprocess, not 'subprocss'; did you mean subproc"):
        load_config(write(rollout=MINIMAL["rollout"] | {"openai": {"mode": "subprocss"}}))


def test_slurm_without_placed_roles_is_refused():
    """Otherwise everything would run on the login node, without a word."""
    with pytest.raises(ConfigError, match=r"scheduler type is slurm, and no role is placed"):
        create_config(MINIMAL | {"scheduler": {"type": "slurm"}})
    create_config(MINIMAL | {"scheduler": {"type": "slurm", "roles": {"trainer": {}}}})


def test_eval_datasets_with_equal_metric_names_are_refused():
    """Names of Prometheus have neither dots nor dashes, so that ``a-b`` and ``a.b`` would be one metric."""
    sets = {"jsonl": "a.jsonl"}
    settings = {"experiment_name": "names", "model": "tiny", "total_steps": 1}
    with pytest.raises(ConfigError, match=r"names a-b and a\.b, whose metrics would have the same names"):
        create_config(settings | {"eval_datasets": {"a-b": sets, "a.b": sets}})
    named = create_config(settings | {"eval_datasets": {"a-b": sets, "a-c": sets}})
    assert ["a-b", "a-c"] == list(named.eval_datasets)
