"""A host as a separate process: the command ``areal-actors host``."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread
from attrs import evolve, field, frozen

from areal_actors.config import RunConfig, save_config
from areal_actors.dashboard import RunDirectory, summarize_run
from areal_actors.dashboard.run_record import read_record
from areal_actors.domain import RunStatus
from areal_actors.errors import ConfigError, InvalidRequest
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.kernel.remote.sockets import is_loopback
from areal_actors.lib import loops
from areal_actors.lib.atomic_write import atomic_path, atomic_write
from areal_actors.lib.service_manager import open_service_manager
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import Accounts, DescribeEndpoint, Endpoint, IdentifyUser, ListKeys
from areal_actors.proxy.access import Authenticator, create_admin_key
from areal_actors.run.signals import EXIT_INTERRUPTED
from areal_actors.viewer import PollIntervals
from areal_actors_service.account_keeper import AccountKeeper
from areal_actors_service.config import host_of, users_of
from areal_actors_service.entry import HostPeers, HostServer
from areal_actors_service.launcher import Launcher, ServiceProvider
from areal_actors_service.messages import Hosting, ListServices, ServiceView, StopServices, TrialId
from areal_actors_service.page import HostPage, Visitor
from areal_actors_service.processes import ServiceProcesses

_log = get_logger(__name__)


@frozen(kw_only=True)
class Host:
    """An open host."""

    endpoint: Endpoint = field(repr=False)
    hosting: Ref[Hosting]
    accounts: Ref[Accounts]
    key_file: Path
    page_url: str | None = field(default=None, repr=False)
    """The URL at which the operator sees all trials, with its token."""


def run_host(config: RunConfig, *, announce: Callable[[str], object]) -> None:
    """Serve until SIGINT or SIGTERM; a second signal exits at once. Raises ``ConfigError``."""
    loops.run(_run, config, announce, event_loop=config.event_loop)


async def _run(config: RunConfig, announce: Callable[[str], object]) -> None:
    stopping = anyio.Event()
    async with open_service_manager() as notify, anyio.create_task_group() as tasks:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            tasks.start_soon(_listen, signals, stopping)
            async with open_host(config) as host:
                announce(f"Listening at {host.endpoint.url}; the admin key is in {host.key_file}.")
                if host.page_url is not None:
                    announce(f"Watch its trials at {host.page_url}")
                notify("READY=1")
                await stopping.wait()
            tasks.cancel_scope.cancel()


async def _listen(signals: AsyncIterator[signal.Signals], stopping: anyio.Event) -> None:
    async for number in signals:
        if stopping.is_set():
            # Exit without cleanup: a second signal asks for that, and no service outlives this process.
            os._exit(EXIT_INTERRUPTED)
        _log.warning("stopping", reason=number.name, detail="saving what is trained; once more to leave at once")
        stopping.set()


@asynccontextmanager
async def open_host(
    config: RunConfig, *, provider: ServiceProvider | None = None, page_intervals: PollIntervals | None = None
) -> AsyncIterator[Host]:
    """Serve while the block lasts. On exit all services are stopped, each after saving a checkpoint.

    ``provider`` replaces the default, which starts services as child processes. ``page_intervals`` says how often the
    page looks for changes. Raises ``ConfigError``.
    """
    check_host(config)
    key_file, settings = config.fileroot / "host.key", config.fileroot / "host.yaml"
    admin_key = await to_thread.run_sync(_prepare, config, key_file, settings)
    users, own = users_of(config), host_of(config)
    assert users.path is not None, "users_of fills it in"
    async with ActorSystem.open() as system:
        provider = provider or ServiceProcesses(
            settings=settings,
            fileroot=config.fileroot,
            is_over=partial(_is_over, config),
            max_start_seconds=own.max_start_seconds,
            stop_timeout_seconds=own.stop_timeout_seconds,
        )
        hosting = await system.spawn(Launcher(provider, config=own.launcher), name="launcher")
        accounts = await system.spawn(AccountKeeper(users.path, config=users), name="accounts")
        default = TrialId(config.experiment_name, config.trial_name)
        peers = HostPeers(hosting=hosting, accounts=accounts, default=default, admin_key=admin_key)
        page = _create_page(peers, config.fileroot, page_intervals or PollIntervals()) if config.logging.page else None
        if page is not None:
            peers = evolve(peers, page=page, is_page_path=page.serves)
        # The host's own address, with the limits that its services have.
        listening = evolve(config.proxy, host=own.host, port=own.port, public_host=own.public_host, admin_key=None)
        serving = await system.spawn(HostServer(peers, config=listening), name="host")
        endpoint = await serving.ask(DescribeEndpoint())
        try:
            page_url = None if page is None else f"{endpoint.url}/?token={page.token}"
            yield Host(endpoint=endpoint, hosting=hosting, accounts=accounts, key_file=key_file, page_url=page_url)
        finally:
            # Each service has a bounded time to stop.
            with anyio.CancelScope(shield=True):
                await hosting.ask(StopServices())


def _create_page(peers: HostPeers, fileroot: Path, intervals: PollIntervals) -> HostPage:
    authenticator = Authenticator(admin_key=peers.admin_key)

    async def identify(key: str) -> Visitor:
        if authenticator.is_admin(key):
            return Visitor(trial=None)
        user = (await peers.accounts.ask(IdentifyUser(secret=key))).user
        try:
            trial = peers.find_trial(user)
        except ValueError as error:
            raise InvalidRequest(f"{error}. Ask the operator of this host to name your experiment.") from error
        others = {
            issued.user.name
            for issued in await peers.accounts.ask(ListKeys())
            if (issued.user.experiment or peers.default.experiment, issued.user.trial or peers.default.trial)
            == (trial.experiment, trial.trial)
        }
        return Visitor(trial=trial.name, is_shared=bool(others - {user.name}))

    async def list_services() -> tuple[ServiceView, ...]:
        return await peers.hosting.ask(ListServices())

    return HostPage(fileroot=fileroot, identify=identify, list_services=list_services, intervals=intervals)


def _is_over(config: RunConfig, directory: RunDirectory) -> bool:
    """Return whether a trial has made all steps and, as ``config`` says, does not answer with its weights after them.

    After a restart of the host its service would be started, answer for the seconds that it needs to see this, and end.
    """
    if not config.serve.exit_when_trained:
        return False
    record = read_record(directory)
    is_finished = record is not None and record.status is RunStatus.FINISHED and directory.model is not None
    return is_finished and summarize_run(directory).steps >= config.total_steps


def check_host(config: RunConfig) -> None:
    """Raise ``ConfigError`` for settings that are valid for a single service but not for several."""
    problems, own = [], host_of(config)
    if not config.journal.enabled:
        problems.append("journal.enabled: a host stops services and starts them again; leave the journal on")
    # One path for all services would make them write to the same journal.
    if config.journal.path is not None:
        problems.append("journal.path: the services of a host have a journal each; leave the path out")
    if not is_loopback(own.host) and not own.admin_key:
        problems.append(
            f"host.host: {own.host} can be reached from other machines; set host.admin_key, or listen on 127.0.0.1"
        )
    if problems:
        raise ConfigError(tuple(problems))


def _prepare(config: RunConfig, key_file: Path, settings: Path) -> str:
    """Write the settings file of the services and the admin key file of the host, and return the key."""
    config.fileroot.mkdir(parents=True, exist_ok=True)
    # A generated key is reused after a restart, so that clients keep working.
    key = host_of(config).admin_key or (key_file.read_text().strip() if key_file.exists() else create_admin_key())
    atomic_write(key_file, f"{key}\n", mode=0o600)
    # Clients reach services through the host only, and the services share its users.
    proxy = evolve(config.proxy, host="127.0.0.1", port=0, public_host=None, admin_key=None, open_sessions=False)
    sections = {"users": users_of(config), "host": evolve(host_of(config), admin_key=None)}
    # The page of all trials is the host's; a port of their own would be in use for the second service.
    logging = evolve(config.logging, page_port=0)
    shared = evolve(config, proxy=proxy, logging=logging, plugins={**config.plugins, **sections})
    with atomic_path(settings, mode=0o600) as partial:
        save_config(shared, partial)
    return key
