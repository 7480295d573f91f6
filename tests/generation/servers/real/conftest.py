"""A real server for the tests here: which kind, and in which Python, say the nox sessions ``engines-…``.

``AREAL_SERVER`` names the kind and ``AREAL_SERVER_PYTHON`` the Python that it is installed for. Without them, nothing
here runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from attrs import evolve, field, frozen
from tests.generation.servers.server_stack import open_replicated
from transformers import LlamaConfig, LlamaForCausalLM

from areal_actors.domain import Floats, Ints, Snapshot, as_floats
from areal_actors.generation.servers.config import Backend, ServerConfig
from areal_actors.generation.servers.launching import find_kind, format_command
from areal_actors.models.built_in import create_tiny_tokenizer

START_SECONDS = 300.0
"""A server on two busy cores takes one to two minutes."""

SETTINGS: Mapping[Backend, ServerConfig] = {
    Backend.VLLM: ServerConfig(
        arguments=(
            *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32"),
            *("--structured-outputs-config", '{"backend": "guidance"}'),
        ),
        environment={
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # It would compile one function for half a minute, at the first request.
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    ),
}
"""What a server needs to run on a CPU, beside what every server of its kind is started with."""


@frozen(kw_only=True)
class Policy:
    """A small model, in its directory and in memory. Its output layer is its own, and its heads have 32 dimensions."""

    directory: Path
    model: LlamaForCausalLM

    versions: dict[int, LlamaForCausalLM] = field(factory=dict)

    def perturbed(self, version: int) -> LlamaForCausalLM:
        """The same architecture with weights that belong to ``version``; 0 has those on disk."""
        if version not in self.versions:
            torch.manual_seed(1000 + version)
            self.versions[version] = LlamaForCausalLM(self.model.config).eval() if version else self.model
        return self.versions[version]

    def snapshot(self, version: int) -> Snapshot:
        """Weights for an engine."""
        return Snapshot(version=version, state=self.perturbed(version).state_dict())

    def recompute(self, prompt: Ints, output: Ints, *, version: int = 0) -> Floats:
        """Plain log-probabilities of ``output`` behind ``prompt``."""
        ids = torch.tensor([*prompt.tolist(), *output.tolist()], dtype=torch.long)
        with torch.no_grad():
            logits = self.perturbed(version)(ids[None]).logits[0, len(prompt) - 1 : -1]
        return as_floats(torch.log_softmax(logits, -1).gather(1, ids[len(prompt) :, None])[:, 0])


@pytest.fixture(scope="session")
def backend() -> Backend:
    """The kind of server; skips without one."""
    name = os.environ.get("AREAL_SERVER")
    if name is None:
        pytest.skip("needs an inference server: nox -s engines-vllm")
    return Backend(name)


@pytest.fixture(scope="session")
def config(backend: Backend) -> ServerConfig:
    """How it is started."""
    return evolve(SETTINGS[backend], python=os.environ["AREAL_SERVER_PYTHON"], start_timeout_seconds=START_SECONDS)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """The model that is served."""
    directory = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    settings = LlamaConfig(
        vocab_size=384,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.07,
    )
    model = LlamaForCausalLM(settings).eval()
    model.save_pretrained(directory)
    create_tiny_tokenizer().save_pretrained(directory)
    return Policy(directory=directory, model=model)


@contextmanager
def _serving(backend: Backend, config: ServerConfig, policy: Policy, port: int, log: Path) -> Iterator[str]:
    kind, url = find_kind(backend), f"http://127.0.0.1:{port}"
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            format_command(kind, config, model=policy.directory, port=port),
            env=inherited | dict(kind.environment) | dict(config.environment),
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        _wait(process, url, log)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"The server did not start:\n{log.read_text(errors='replace')[-4000:]}")


@pytest.fixture(scope="session")
def server(backend, config, policy, tmp_path_factory) -> Iterator[str]:
    """The URL of a server that most tests share, one after the other."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with _serving(backend, config, policy, port, tmp_path_factory.mktemp("server") / "server.log") as url:
        yield url


@pytest.fixture
def open_remote(backend, config, policy, server, tmp_path) -> Callable:
    """Opens an engine of the shared server, which has the weights of version 0 then."""

    @asynccontextmanager
    async def open_it(urls=None):
        dialect = find_kind(backend).create()
        async with open_replicated(
            dialect,
            evolve(config, health_interval_seconds=0.2),
            urls=urls or [server],
            model=policy.directory,
            snapshot=policy.snapshot(0),
            publish_directory=tmp_path,
        ) as remote:
            yield remote

    return open_it


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print a figure."""

    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\n    {text}")  # noqa: T201 - the figures are what this is run for

    return say
