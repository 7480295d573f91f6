"""Opening a Tinker server: the base model twice (to sample, to train), the proxy for agents, and Tinker's routes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import anyio
from anyio import to_thread
from attrs import frozen

from areal_actors.errors import ConfigError
from areal_actors.generation.model_host import ModelHost, ModelsConfig
from areal_actors.generation.torch import TorchEngine
from areal_actors.kernel import ActorSystem
from areal_actors.kernel.remote.sockets import is_loopback
from areal_actors.lib.telemetry import quiet_transformers
from areal_actors.lib.threads import OwnThread
from areal_actors.messages import DescribeEndpoint
from areal_actors.models import resolve_model
from areal_actors.proxy import ProxyServer
from areal_actors.proxy.config import ProxyConfig
from areal_actors.proxy.server import listen, serve_until_cancelled, url_of
from areal_actors.rendering import load_renderer
from areal_actors.run.inference import InferenceConfig, open_engine, spawn_generation, spawn_session_actors
from areal_actors_tinker.app import create_app
from areal_actors_tinker.bank import AdapterBank
from areal_actors_tinker.config import TinkerConfig
from areal_actors_tinker.futures import Futures
from areal_actors_tinker.service import TinkerService


@frozen(kw_only=True)
class TinkerServer:
    """An open server: where clients of Tinker connect, and where agents do."""

    url: str
    agent_url: str
    """Base URL of OpenAI's and Anthropic's protocols; ``model`` names a checkpoint as ``<run>/<name>``."""
    admin_key: str
    service: TinkerService


def check_access(config: TinkerConfig) -> None:
    """Raise ``ConfigError`` for an address that other machines can reach without a key."""
    if not is_loopback(config.host) and config.api_key is None:
        raise ConfigError(f"{config.host} can be reached from other machines; set --api-key, or listen on 127.0.0.1")


@asynccontextmanager
async def open_server(
    config: TinkerConfig, *, wall_clock: Callable[[], float] = time.time
) -> AsyncIterator[TinkerServer]:
    """Serve ``config.model`` to clients of Tinker and to agents while the block lasts.

    Raises ``ConfigError`` for an address that cannot be used, ``ModelError`` for a model that cannot be trained.
    """
    try:
        config.fileroot.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=config.fileroot):
            pass
    except OSError as error:
        raise ConfigError(f"--fileroot: {config.fileroot} cannot be written: {error.strerror or error}") from error
    listener = listen(config.host, config.port, prefix="")
    try:
        files = await to_thread.run_sync(resolve_model, config.model)
        renderer = await to_thread.run_sync(load_renderer, files.path)

        def load() -> AdapterBank:
            from transformers import AutoModelForCausalLM

            factory: Any = AutoModelForCausalLM
            with quiet_transformers():
                model = factory.from_pretrained(files.path, local_files_only=True, dtype="float32")
            return AdapterBank(model, max_packed_tokens=config.max_packed_tokens)

        async with (
            OwnThread.open() as thread,
            open_engine(config.engine, model=files.path, renderer=renderer) as engine,
            ActorSystem.open() as system,
            anyio.create_task_group() as tasks,
        ):
            assert isinstance(engine, TorchEngine), "the configuration is that of an embedded engine"
            bank = await thread.run(load)
            generation = await spawn_generation(system, engine)
            service = TinkerService(
                config,
                bank=bank,
                thread=thread,
                renderer=renderer,
                base=generation,
                info=engine.info,
                directory=files.path,
                futures=Futures(tasks),
                wall_clock=wall_clock,
            )
            await to_thread.run_sync(service.store.sweep)
            models = ModelsConfig(fileroot=config.fileroot, max_loaded=config.max_samplers)
            host = ModelHost(service, service.open_sampler, config=models)
            service.host = await system.spawn(host, name="models")
            inference = InferenceConfig()
            actors = await spawn_session_actors(system, inference, renderer=renderer, generation=generation)
            proxy = ProxyServer(
                sessions=actors.sessions,
                exports=actors.exports,
                capacity=actors.capacity,
                generation=generation,
                models=service.host,
                config=ProxyConfig(),
                token_bytes=renderer.token_bytes,
            )
            endpoint = await (await system.spawn(proxy, name="proxy")).ask(DescribeEndpoint())
            tasks.start_soon(service.end_silent_sessions)
            serve = partial(serve_until_cancelled, create_app(service), listener, service.futures, drain_seconds=0.0)
            tasks.start_soon(serve)
            yield TinkerServer(
                url=url_of(listener), agent_url=f"{endpoint.url}/v1", admin_key=endpoint.admin_key, service=service
            )
            tasks.cancel_scope.cancel()
    finally:
        # The server detaches the socket once it serves it.
        listener.close()


async def run_server(config: TinkerConfig, announce: Callable[[str], object]) -> None:
    """Serve until cancelled."""
    async with open_server(config) as server:
        announce(f"export TINKER_BASE_URL={server.url} TINKER_API_KEY=tml-local")
        announce(f"agents: OPENAI_BASE_URL={server.agent_url} OPENAI_API_KEY={server.admin_key}, model <run>/<name>")
        await anyio.sleep_forever()
