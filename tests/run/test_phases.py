"""Runs of several phases on the tiny model: one axis of steps, stopped and resumed in the middle of any of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file

from areal_actors.config import create_config, load_config
from areal_actors.dashboard import RunDirectory
from areal_actors.errors import ConfigError, DatasetError
from areal_actors.models import load_policy
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.rendering import load_renderer
from areal_actors.run.serving import Server
from areal_actors.run.training import Trainer

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = (
    "batch_size=2",
    "rollout.group_size=2",
    "eval_dataset.size=2",
    "sft.batch_size=4",
    "engine={max_concurrent: 8, max_length: 128, deterministic: true, num_threads: 1}",
    "logging={trackers: [], display: plain}",
    "trainer.dtype=float32",
    "trainer.optimizer.num_warmup_steps=1",
    "checkpoint.every_steps=1",
)


def configure(*more):
    """The warm start, made small."""
    return load_config(EXAMPLES / "warm_start.yaml", (*SMALL, *more))


def read_metrics(run_dir):
    """The records of all steps."""
    return [json.loads(line) for line in RunDirectory(path=run_dir).metrics.read_text().splitlines()]


def weights(run_dir):
    """The exported weights."""
    return load_file(RunDirectory(path=run_dir).weights / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three supervised steps and two on rewards."""
    path = tmp_path_factory.mktemp("phases") / "whole"
    Trainer(configure("sft.steps=3", "total_steps=5", "evaluation.every_steps=2")).train(run_dir=path)
    return path


def test_phases_share_step_numbers(whole):
    """Steps are counted on; each is named; no agent samples in a supervised one, which has no reward."""
    records = read_metrics(whole)

    assert [(record["step"], record["phase"]) for record in records] == [
        (0, None), (1, "sft"), (2, "sft"), (3, "sft"), (4, "rl"), (5, "rl"),
    ]  # fmt: skip
    assert [record["reward"] is None for record in records] == [True] * 4 + [False] * 2
    assert [record["step"] for record in records if record["eval_reward"] is not None] == [0, 2, 3, 4, 5]
    assert records[1]["loss"] > records[3]["loss"] > 0
    assert all(record["behaviour_gap_mean"] is None and record["staleness_mean"] is None for record in records[:4])
    assert all(record["behaviour_gap_mean"] < 1e-4 for record in records[4:] if record["num_updates"])
    assert records[1]["trained_episodes"] == 4
    assert [record["learning_rate"] for record in records[3:]] == [0.004, 0.001, 0.001]


def test_run_resumes_within_phase(whole, tmp_path):
    """Ended in the warm start and resumed, it enters the next phase and has the weights of the one that was not."""
    path = tmp_path / "run"
    config = configure("sft.steps=3", "total_steps=5", "evaluation.every_steps=2")
    short = evolve(config, total_steps=2, sft=evolve(config.sft, steps=2), phases=config.phases[:1])
    Trainer(short).train(run_dir=path)

    Trainer(config).train(run_dir=path, resume=True)

    expected = weights(whole)
    assert [record["step"] for record in read_metrics(path)] == [0, 1, 2, 3, 4, 5]
    for name, weight in weights(path).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)


def test_sft_alone_needs_no_agent(tmp_path):
    """A file and a model are enough; the weights are exported."""
    settings = {
        "experiment_name": "sft",
        "model": "tiny",
        "phases": ["sft"],
        "sft": {"jsonl": str(EXAMPLES / "warm_start.jsonl")},
        "total_steps": 2,
        "engine": {"max_length": 128},
        "logging": {"trackers": [], "display": "plain"},
    }

    summary = Trainer(create_config(settings)).train(run_dir=tmp_path / "run")

    assert summary.steps == 2
    assert [record["phase"] for record in read_metrics(tmp_path / "run")] == ["sft", "sft"]
    assert weights(tmp_path / "run")


def test_sft_trains_on_rollouts_of_another_run(whole, tmp_path):
    """With the ids that were sampled; all of them here, as none has a reward."""
    data = f"sft={{run: {whole}, steps: 1, batch_size: 4}}"

    summary = Trainer(configure(data, "total_steps=1", "phases=[sft]")).train(run_dir=tmp_path / "run")

    assert summary.steps == 1
    with pytest.raises(DatasetError, match="None of the 8 episodes"):
        bad = configure(f"sft={{run: {whole}, min_reward: 0.5}}", "total_steps=1", "phases=[sft]")
        Trainer(bad).train(run_dir=tmp_path / "bad")


def test_service_refuses_phases(tmp_path):
    """It says how to use the others."""
    with pytest.raises(
        ConfigError, match=r"a service trains in the phase rl only, not \[sft, rl\]; run the others with"
    ):
        Server(configure()).serve(run_dir=tmp_path)


# ------------------------------------------------------------------------------------------------ distillation


@pytest.fixture
def distil(whole):
    """A distillation phase after one supervised step, from the model of the whole run."""
    teacher = {"model": str(RunDirectory(path=whole).weights)}

    def configure_with(*more, **settings):
        section = json.dumps({"teacher": teacher, "steps": 2} | settings)
        return configure(
            "sft.steps=1", "total_steps=4", "phases=[sft,distillation,rl]", f"distillation={section}", *more
        )

    return configure_with


def test_policy_approaches_local_teacher(distil, tmp_path):
    """Steps of distillation report the distance to the teacher, with rewards; the next phase does not."""
    Trainer(distil()).train(run_dir=tmp_path / "run")

    records = read_metrics(tmp_path / "run")[1:]

    assert [record["phase"] for record in records] == ["sft", "distillation", "distillation", "rl"]
    assert [record["teacher_kl"] is not None for record in records] == [False, True, True, False]
    assert all(record["num_updates"] == 1 for record in records[1:3])
    assert records[1]["reward"] is not None


@contextmanager
def serving(model, *, text) -> Iterator[str]:
    """A server in vLLM's form with a real model; ``text`` is its tokenizer's."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"data": [{"id": "teacher"}]})

        def do_POST(self):
            ids = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
            with torch.no_grad():
                scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            entries = [
                {str(token): {"logprob": float(scores[place, token]), "decoded_token": text(token)}}
                for place, token in enumerate(ids[1:])
            ]
            self.reply({"choices": [{"prompt_logprobs": [None, *entries]}]})

        def reply(self, document):
            content = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_teacher_at_url_gives_equal_run(distil, whole, tmp_path):
    """Scored by a server while groups are collected, the run has the weights of the one with the model inside."""
    path = RunDirectory(path=whole).weights
    renderer = load_renderer(path)
    Trainer(distil()).train(run_dir=tmp_path / "inside")

    with serving(load_policy(path), text=lambda token: renderer.decode([token])) as url:
        Trainer(distil(teacher={"url": url})).train(run_dir=tmp_path / "outside", backend="trio")

    inside, outside = weights(tmp_path / "inside"), weights(tmp_path / "outside")
    for name, weight in inside.items():
        torch.testing.assert_close(outside[name], weight, rtol=0, atol=1e-4)


def test_teacher_with_another_tokenizer_is_refused(distil, whole, tmp_path):
    """A directory by its vocabulary, a server by the text of its tokens; nothing is written."""
    other = create_tiny_tokenizer()
    other.add_tokens(["another"])
    student = tmp_path / "student"
    shutil.copytree(RunDirectory(path=whole).weights, student)
    other.save_pretrained(student)
    run_dir = tmp_path / "run"

    with pytest.raises(
        ConfigError, match=r"has another tokenizer than the student: 1 of 385 token ids differ \(384 is"
    ):
        Trainer(distil(f"model={student}")).train(run_dir=run_dir)
    with (
        serving(load_policy(student), text=lambda token: f"<{token}>") as url,
        pytest.raises(ConfigError, match=r"has another tokenizer than the student: \d+ of \d+ token ids differ"),
    ):
        Trainer(distil(teacher={"url": url})).train(run_dir=run_dir)

    assert not run_dir.exists()
