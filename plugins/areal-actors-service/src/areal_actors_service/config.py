"""The sections that this plug-in adds to a configuration: ``users`` and ``host``."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve, field, frozen
from attrs.validators import ge, gt, le

from areal_actors.config import RunConfig
from areal_actors.lib.settings import check_host, constant
from areal_actors_service.launcher import LauncherConfig


@frozen(kw_only=True)
class UsersConfig:
    """Storage of users and their keys."""

    path: Path | None = None
    """The account file; keys.sqlite in fileroot if unset. It is created with the first key, on a local disk."""
    save_seconds: float = constant(1.0)
    """Interval at which token usage is written and the file is checked for changes made by the command line."""


@frozen(kw_only=True)
class HostConfig:
    """The address of a host (areal-actors host), and how many services it runs for the trials of its users."""

    host: str = field(default="127.0.0.1", validator=check_host)
    """Address to listen on."""
    port: int = field(default=8080, validator=[ge(0), le(65535)])
    """0 takes any free port."""
    public_host: str | None = None
    """Name under which agents reach this machine, if it differs from host."""
    admin_key: str | None = field(default=None, repr=False)
    """Authorises the routes that manage users and services.

    Without it, a random one is created and kept in host.key.
    """
    max_services: int = field(default=4, validator=ge(1))
    """Services that run at the same time, each with its own model."""
    idle_seconds: float = field(default=1800.0, validator=gt(0))
    """A service without requests for this long is stopped, with a checkpoint; the next request starts it again. .inf is
    never."""
    make_room_seconds: float = field(default=60.0, validator=ge(0))
    """A service without requests for this long is stopped if another trial needs its place."""
    start_timeout_seconds: float = constant(120.0)
    """How long a request waits for its service to start before it is told to retry."""
    max_start_seconds: float = constant(600.0)
    """A service that does not listen after this long is stopped and started again."""
    stop_timeout_seconds: float = constant(120.0)
    """How long a service may take to finish its step and to write its checkpoint, before it is killed."""

    @property
    def launcher(self) -> LauncherConfig:
        """The launcher's part of these settings."""
        return LauncherConfig(
            max_services=self.max_services,
            idle_seconds=self.idle_seconds,
            make_room_seconds=self.make_room_seconds,
            start_timeout_seconds=self.start_timeout_seconds,
        )


def users_of(config: RunConfig) -> UsersConfig:
    """Return the settings of users; by default they are stored in one file for all runs below ``fileroot``."""
    users: UsersConfig = config.plugins.get("users", UsersConfig())
    return evolve(users, path=users.path or config.fileroot / "keys.sqlite")


def host_of(config: RunConfig) -> HostConfig:
    """Return the settings of the host."""
    found: HostConfig = config.plugins.get("host", HostConfig())
    return found
