"""A real SGLang server, the engine that speaks to it, and the model on our side: for the checks of it."""

# ruff: noqa: ASYNC110 - no event says that a server has sampled enough

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import anyio
import numpy as np
import torch
from attrs import evolve, frozen
from tests.generation.servers.gateways import open_gateway
from tests.generation.servers.server_stack import ReplicatedServers, open_replicated

from areal_actors.domain import EngineRequest, SampleKey, Sampling, Snapshot, as_floats
from areal_actors.generation.servers.config import Backend, ServerConfig
from areal_actors.generation.servers.launching import LaunchedServers, find_kind, launch_servers
from areal_actors.models import load_policy, resolve_model
from areal_actors.rendering import load_renderer
from areal_actors_testing.engine_contract import Subject

CPU_SERVER = Path(__file__).with_name("sglang_cpu.py")
ARGUMENTS = (
    *("--device", "cpu", "--dtype", "float32", "--max-total-tokens", "65536", "--max-running-requests", "64"),
    *("--skip-server-warmup", "--incremental-streaming-output", "--grammar-backend", "llguidance"),
)
TOLERANCE = 1e-4


@frozen(kw_only=True)
class RealServer:
    """A server, an engine, and the model on our side."""

    engine: ReplicatedServers
    launched: LaunchedServers
    policy: torch.nn.Module
    subject: Subject

    def gap(self, chunks) -> float:
        """The largest difference between the server's log-probabilities and ours."""
        ids = [int(token_id) for chunk in chunks for token_id in chunk.token_ids]
        found = np.concatenate([chunk.raw_logprobs for chunk in chunks])
        return float(np.abs(found - self.subject.recompute(self.subject.prompt, np.asarray(ids))).max())


def create_config(python: str, *, num_servers: int = 1) -> ServerConfig:
    return ServerConfig(
        # -P: modules beside the script would hide those of the standard library, such as http.
        command=(python, "-P", str(CPU_SERVER)),
        arguments=ARGUMENTS,
        environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        num_servers=num_servers,
        health_interval_seconds=0.5,
    )


@asynccontextmanager
async def open_server_stack(
    config: ServerConfig, directory: Path, *, smg: str | None = None
) -> AsyncIterator[RealServer]:
    """Servers and an engine; through a gateway, where there is a Python ``smg`` that one is installed for."""
    path = resolve_model("tiny").path
    renderer, policy = load_renderer(path), load_policy(path).float().eval()

    def recompute(prompt, output):
        ids = torch.tensor(np.concatenate([prompt, output]), dtype=torch.long)
        with torch.no_grad():
            logprobs = torch.log_softmax(policy(ids[None]).logits[0, len(prompt) - 1 : -1].float(), -1)
        return as_floats(logprobs.gather(1, ids[len(prompt) :, None])[:, 0])

    kind = find_kind(Backend.SGLANG)
    added = {token.content: index for index, token in renderer.tokenizer.get_added_tokens_decoder().items()}
    async with (
        launch_servers(kind, config, model=path, logs=directory / "logs") as launched,
        open_gateway(smg, launched.urls, log=directory / "gateway.log") if smg else nullcontext() as gateway_url,
        open_replicated(
            kind.create(added_tokens=added),
            evolve(config, gateway_url=gateway_url),
            urls=launched.urls,
            model=path,
            snapshot=Snapshot(version=0, path=path),
            publish_directory=directory / "published",
            processes=launched,
        ) as engine,
    ):
        subject = Subject(
            engine=engine,
            create_snapshot=lambda version: Snapshot(version=version, state=policy.state_dict()),
            prompt=np.random.default_rng(3).integers(3, 384, 40),
            num_tokens=300,
            recompute=recompute,
            tolerance=TOLERANCE,
            decode=renderer.decode,
            stop_token_ids=(2,),
        )
        yield RealServer(engine=engine, launched=launched, policy=policy, subject=subject)


def ask(real: RealServer, name: str, *, num_tokens: int = 200) -> EngineRequest:
    return EngineRequest(
        id=name,
        prompt=real.subject.prompt,
        sampling=Sampling(max_new_tokens=num_tokens),
        key=SampleKey(seed=0),
        routing_key=name,
    )


async def wait_for_tokens(real: RealServer, number: int) -> None:
    """Wait until so many tokens were sampled; fewer than were requested, so that a request still runs."""
    while real.engine.statistics().sampled_tokens < number:
        await anyio.sleep(0.005)
