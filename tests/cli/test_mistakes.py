"""Mistakes that users make: each is one clear message that says what to do, and nothing is left on disk."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_actors.cli import cli
from areal_actors.models import resolve_model

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "reference" / "mistakes.md").read_text(encoding="utf-8")
AGENTS = """
class NoRun:
    pass


class Broken:
    def __init__(self):
        raise ValueError("no database")


class Blocking:
    def run(self, data, **kwargs):
        return 1.0


class Idle:
    async def run(self, data, **kwargs):
        return 1.0
"""
FILES: dict[str, str | bytes] = {
    "agents.py": AGENTS,
    "absent.py": "import a_package_that_is_not_there",
    "empty.yaml": "",
    "broken.yaml": "a: [1\n",
    "empty.jsonl": "",
    "bad.jsonl": '{"a": 1}\n{oops\n',
    "array.jsonl": '[\n{"a": 1},\n{"a": 2}\n]\n',
    "line.jsonl": '[{"a": 1}, {"a": 2}]\n',
    "pretty.jsonl": '{\n  "a": 1\n}\n',
    "table.csv": "question,answer\n1 + 1,2\n",
    "cut.jsonl": '{"a": 1}\n\0\0\0\n',
    "packed.jsonl.gz": gzip.compress(b"{}", mtime=0),
    "latin.jsonl": '{"a": "ä"}\n'.encode("latin-1"),
    "utf16.jsonl": '{"a": 1}\n'.encode("utf-16"),
    "encoded/utf16.yaml": "a: 1\n".encode("utf-16"),
    "adapter/adapter_config.json": '{"r": 4, "lora_alpha": 32}',
    "adapter/base_model.json": '{"name": "another-model", "fingerprint": "0"}',
}
TRAIN = ("train", "tiny.yaml")

MISTAKES = [
    # In the configuration
    ((*TRAIN, "trainer.lr=0.1"), "trainer.lr is not a setting; did you mean trainer.optimizer.learning_rate?"),
    ((*TRAIN, "num_generations=4"), "did you mean rollout.group_size?"),
    ((*TRAIN, "trainer.learning_rate=0.1"), "did you mean trainer.optimizer.learning_rate"),
    ((*TRAIN, "rolout.group_size=4"), "rolout is not a setting; did you mean rollout?"),
    ((*TRAIN, "batch_size=many"), "batch_size must be a whole number, not 'many'"),
    ((*TRAIN, "batch_size=-4"), "batch_size must be >= 1, not -4"),
    ((*TRAIN, "seed=-5"), "seed must be >= 0, not -5"),
    ((*TRAIN, "trial_name=a/b"), "trial_name cannot be 'a/b'; use letters, digits, '.', '_' and '-', a letter"),
    ((*TRAIN, "total_steps"), "'total_steps' is not an override; write key=value"),
    ((*TRAIN, "rollout={a: [}"), "'rollout={a: [}': its value:1:6 is not valid YAML"),
    ((*TRAIN, "trainer.optimizer.name=adamw_fp16"), "did you mean adamw_bf16?"),
    ((*TRAIN, "rollout.openai.reward_rule=median"), "must be one of mean, sum, max, creation-order, or a function"),
    ((*TRAIN, "phases=[sft, rl]"), "there is no section sft; add it, or leave the phase out"),
    ((*TRAIN, "gconfig.temperature=-1"), "gconfig.temperature must be >= 0.0, not -1.0"),
    ((*TRAIN, "rollout.group_size=1000000000"), "rollout.group_size must be <= 65536, not 1000000000"),
    (("try", "tiny.yaml", "rollout.group_size=1000000000"), "rollout.group_size must be <= 65536"),
    ((*TRAIN, "dataset={jsonl:"), "quote it for the shell: 'dataset={...}'"),
    ((*TRAIN, "rollout.workflow=\u201ctiny_agent.py:TinyAgent\u201d"), "; type plain quotes, or none"),
    ((*TRAIN, "logging.trackers=wandb"), "write ['wandb']"),
    ((*TRAIN, "engine.max_length=4"), "4 tokens for prompt and answer"),
    # Files
    (("train", "nothere.yaml"), "There is no file nothere.yaml; . has broken.yaml, empty.yaml, tiny.yaml."),
    (("train", "empty.yaml"), "experiment_name is missing; it must be text"),
    (("train", "broken.yaml"), "broken.yaml:2:1 is not valid YAML: expected ',' or ']'"),
    ((*TRAIN, "dataset={jsonl: nothere.jsonl}"), "nothere.jsonl cannot be read: No such file"),
    ((*TRAIN, "dataset={jsonl: empty.jsonl}"), "empty.jsonl has no problems: 0 in all."),
    ((*TRAIN, "dataset={jsonl: bad.jsonl}"), "bad.jsonl, line 2 is not JSON"),
    ((*TRAIN, "dataset={jsonl: array.jsonl}"), "jq -c '.[]' FILE"),
    ((*TRAIN, "dataset={jsonl: line.jsonl}"), "jq -c '.[]' FILE"),
    ((*TRAIN, "dataset={jsonl: pretty.jsonl}"), "jq -c . FILE"),
    ((*TRAIN, "dataset={jsonl: table.csv}"), "it looks like CSV"),
    ((*TRAIN, "dataset={jsonl: cut.jsonl}"), "line 2 is not JSON: the line has NUL bytes"),
    ((*TRAIN, "dataset={jsonl: packed.jsonl.gz}"), "unpack it with gunzip"),
    ((*TRAIN, "dataset={jsonl: latin.jsonl}"), "save the file as UTF-8"),
    ((*TRAIN, "dataset={jsonl: utf16.jsonl}"), "the file is UTF-16"),
    (("train", "encoded/utf16.yaml"), "save it as UTF-8"),
    (("train", "encoded"), "encoded is a directory; encoded has utf16.yaml."),
    ((*TRAIN, "dataset.jsonl=table.csv"), "must name exactly one source of"),
    ((*TRAIN, "trainer.metrics=[agents.py:NoRun]"), "agents.py:NoRun is a class; name a function"),
    ((*TRAIN, "dataset={reasoning_gym: chain_sumx}"), "did you mean chain_sum?"),
    ((*TRAIN, "dataset={python: 'tiny_agent.py:problem'}"), "did you mean problems?"),
    ((*TRAIN, "dataset=null"), "dataset is missing: the problems to train on"),
    ((*TRAIN, "--resume"), "to resume; leave --resume out, or check --run-dir."),
    (("eval", "tiny.yaml", "eval_dataset=null"), "eval_dataset is missing: the problems to evaluate on"),
    (("eval", "tiny.yaml", "--model", "runs/tiny/nothere"), "there is neither a run nor a model in"),
    (("view", "nothere"), "nothere holds no run"),
    (("models", "--fileroot", "nothere"), "nothere is not a directory; --fileroot is where runs are written"),
    # The agent
    ((*TRAIN, "rollout.workflow=my_agent.py:Agent"), "those on the command line to the working directory."),
    ((*TRAIN, "rollout.workflow=tiny_agent.py:TinyAgnt"), "did you mean TinyAgent?"),
    ((*TRAIN, "rollout.workflow=absent.py:Agent"), "install the package that has a_package_that_is_not_there for"),
    ((*TRAIN, "rollout.workflow=agents.py:NoRun"), "has no method 'run'; an agent has 'async def run(self, data"),
    ((*TRAIN, "rollout.workflow=agents.py:Broken"), "Broken() raised ValueError: no database"),
    ((*TRAIN, "rollout.workflow=agents.py:Blocking"), "one that blocks needs rollout.openai.mode: subprocess"),
    # What is not here
    ((*TRAIN, "model=llama-3"), "There is no model 'llama-3', neither a directory nor one of"),
    ((*TRAIN, "model=./nothing"), "nothing"),
    ((*TRAIN, "model=owner/name"), "run 'hf download owner/name --local-dir DIRECTORY'"),
    ((*TRAIN, "trainer.lora={rank: 4, target_modules: [q_prj]}"), "did you mean q_proj or v_proj?"),
    ((*TRAIN, "trainer.lora={rank: 4, path: nothere}"), "Name a directory that peft has written."),
    ((*TRAIN, "trainer.lora={rank: 8, path: adapter}"), "has rank 4, and trainer.lora.rank is 8; set it to that"),
    ((*TRAIN, "trainer.lora={rank: 4, path: adapter}"), "was trained on the base model 'another-model', which is not"),
    ((*TRAIN, "phases=[distillation]", "distillation={teacher: {model: ./teacher}}"), "has another tokenizer than"),
    # The service
    (("serve", "tiny.yaml", "proxy.host=0.0.0.0"), "set proxy.admin_key, or listen on 127.0.0.1"),
    (("serve", "tiny.yaml", "proxy.host=256.1.1.1"), "must be a name or an address"),
    # The command line
    (("trian", "tiny.yaml"), "No such command 'trian'. Did you mean 'train'?"),
    ((*TRAIN, "--total-steps", "5"), "A setting is written without dashes: total_steps=VALUE."),
    ((*TRAIN, "--resum"), "No such option '--resum'. Did you mean '--resume'?"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a job that runs, and files that do not."""
    place = tmp_path_factory.mktemp("mistakes")
    for name in ("tiny.yaml", "tiny_agent.py"):
        shutil.copy(EXAMPLES / name, place)
    for name, text in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    teacher = Path(shutil.copytree(resolve_model("tiny").path, place / "teacher"))
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    return place


def row_of(command: tuple[str, ...], stderr: str, place: Path) -> str:
    """Return the row of a mistake on the page of mistakes: the command, and what it prints."""
    message = stderr.replace(f"{place}/", "").replace(sys.executable, "python").partition("Error: ")[2]
    message = message.replace(str(resolve_model("tiny").path), "tiny")
    return f"| `{' '.join(command)}` | {' '.join(message.split())} |"


@pytest.mark.parametrize(("command", "message"), MISTAKES, ids=[" ".join(command) for command, _ in MISTAKES])
def test_train_explains_mistakes(
    place: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], message: str
) -> None:
    """In words that lead to the remedy, without a traceback; no run is begun."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The variable is read when the package is imported, which another test may have done.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = CliRunner().invoke(cli, command)

    assert message in result.stderr
    assert result.exit_code == (1 if command[0] in ("view", "models") else 2)  # 2: a restart cannot help
    assert "Traceback" not in result.stderr
    assert f"\n{row_of(command, result.stderr, place)}\n" in PAGE
    assert [] == [path for path in place.glob("runs/*/*/*") if path.is_file()]


def test_agent_without_requests_is_reported_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every episode fails in the same words, which are shown once, and counted."""
    monkeypatch.chdir(place)
    quick = ("total_steps=1", "logging.page=false", "eval_dataset=null", "rollout.group_size=2")
    result = CliRunner().invoke(cli, [*TRAIN, "rollout.workflow=agents.py:Idle", *quick, "--run-dir", "idle"])

    assert 1 == result.exit_code
    assert "Error: Every episode of the last 16 groups failed" in result.stderr
    assert result.stderr.count("Idle.run never called the model; use the base_url and api_key that it is given.") <= 3
    assert "unhandled" not in result.stderr
