"""The commands ``areal-actors host``, ``entry`` and ``keys``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_actors.cli.commands import read_admin_key
from areal_actors.cli.explaining import config_argument, explains_errors, overrides_argument, verbose_option

if TYPE_CHECKING:
    from areal_actors_service.key_access import KeyClient


@click.command()
@config_argument
@overrides_argument
@verbose_option
@explains_errors
def host(*, config: Path, overrides: tuple[str, ...]) -> None:
    """Serve many users at one URL, each trial in a separate process that is started on first use.

    The key of a user (areal-actors keys create USER --experiment NAME --trial NAME) decides which trial is trained, as
    CONFIG says, in <fileroot>/<experiment>/<trial>. The section host of CONFIG has the settings of the host.

    \b
    Examples:
      areal-actors host my.yaml
      areal-actors host my.yaml host.port=8080 host.max_services=8

    Ctrl-C stops all services, each with a checkpoint; a second one exits at once. After a restart, the host resumes
    each service on its first request.
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.config import load_config
    from areal_actors_service.config import host_of

    loaded, admin_key = load_config(config, overrides), read_admin_key(os.environ)
    if admin_key is not None and host_of(loaded).admin_key is None:
        from attrs import evolve

        # The key is written to no configuration of a trial.
        own = evolve(host_of(loaded), admin_key=admin_key)
        loaded = evolve(loaded, plugins={**loaded.plugins, "host": own})
    if loaded.logging.display != "none":
        click.echo(f"{loaded.experiment_name}: starting the host; services load {loaded.model} on first use", err=True)
    from areal_actors.lib.process_limits import raise_open_files_limit
    from areal_actors_service.host import run_host

    raise_open_files_limit()
    run_host(loaded, announce=click.echo)


@click.command()
@click.argument("proxies", nargs=-1, required=True, metavar="NAME=URL...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, show_default=True, help="Port to listen on; 0 takes any free one.")
@verbose_option
@explains_errors
def entry(*, proxies: tuple[str, ...], host: str, port: int) -> None:
    """Serve several services at one URL; each session stays at the service where it was started.

    NAME is the service's own name, its setting sessions.service_name. Ctrl-C stops after pending requests are answered.

    \b
    Example:
      areal-actors serve a.yaml sessions.service_name=a proxy.port=8001
      areal-actors serve b.yaml sessions.service_name=b proxy.port=8002
      areal-actors entry a=http://127.0.0.1:8001 b=http://127.0.0.1:8002
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.lib.process_limits import raise_open_files_limit
    from areal_actors_service.entry.server import parse_backends, run_entry

    raise_open_files_limit()
    run_entry(parse_backends(proxies), host=host, port=port, announce=click.echo)


_STORE = Path("runs/keys.sqlite")
_KEY_OPTIONS = (
    click.option(
        "--store",
        type=click.Path(path_type=Path, dir_okay=False),
        default=_STORE,
        show_default=True,
        help="The file of keys: users.path of the configuration, or keys.sqlite in fileroot.",
    ),
    click.option("--url", help="A running service to ask instead; its admin key is needed then."),
    click.option("--admin-key", envvar="AREAL_ADMIN_KEY", help="Better given as AREAL_ADMIN_KEY in the environment."),
)


def _with_key_client(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that select where keys are kept; it takes them as ``client``."""

    @functools.wraps(command)
    def opened(*, store: Path, url: str | None, admin_key: str | None, **options: Any) -> None:
        from areal_actors_service.key_access import open_keys

        command(client=open_keys(store=store, url=url, admin_key=admin_key), **options)

    for option in reversed(_KEY_OPTIONS):
        opened = option(opened)
    return opened


@click.group()
def keys() -> None:
    """Give keys with quotas to users, and revoke them.

    The file of keys may be used while a service on this machine uses it: a new key works at once, and a revoked one
    stops within a second. With --url a running service is used, from any machine that can reach it.
    """


@keys.command("create")
@click.argument("user")
@click.option("--experiment", help="What the user's sessions belong to.")
@click.option("--trial", help="What the user's sessions belong to.")
@click.option("--max-sessions", type=click.IntRange(min=0), help="Sessions that are live at once.")
@click.option("--requests-per-minute", type=click.IntRange(min=0), help="Requests for completions in any 60 seconds.")
@click.option("--tokens-per-day", type=click.IntRange(min=0), help="Sampled tokens from midnight to midnight, UTC.")
@click.option("--expires", metavar="TIME", help="When the key ends, as ISO 8601: 2027-01-31 or 2027-01-31T12:00+01:00.")
@verbose_option
@explains_errors
@_with_key_client
def create_user_key(
    *,
    client: KeyClient,
    requests_per_minute: int | None,
    tokens_per_day: int | None,
    expires: str | None,
    **fields: Any,
) -> None:
    """Issue a key to USER, who may be new. It is printed only now, and cannot be read again.

    Quotas apply to the user, for all keys together: those given here replace the previous ones.

    \b
    Examples:
      areal-actors keys create ada --max-sessions 20 --tokens-per-day 1000000
      OPENAI_API_KEY=$(areal-actors keys create ada --url http://trainer:8080)
    """  # noqa: D301 - a real backspace tells click to keep the lines
    limits = {"max_requests_per_minute": requests_per_minute, "max_tokens_per_day": tokens_per_day}
    created = client.create({**fields, **limits, "expires_at": expires})
    click.echo(f"{created['id']} of {created['user']}; this is the only time that it is shown:", err=True)
    click.echo(created["key"])


@keys.command("list")
@verbose_option
@explains_errors
@_with_key_client
def list_keys(*, client: KeyClient) -> None:
    """List every key: its user, the user's quotas and usage of today, and whether it is valid."""
    from areal_actors_service.key_access import format_keys

    click.echo(format_keys(client.list()))


@keys.command("revoke")
@click.argument("key_id")
@verbose_option
@explains_errors
@_with_key_client
def revoke_key(*, client: KeyClient, key_id: str) -> None:
    """Revoke the key KEY_ID (key_…, as listed), and close the sessions that it has started."""
    revoked = client.revoke(key_id)
    click.echo(f"{revoked['id']} of {revoked['user']} is revoked.")
