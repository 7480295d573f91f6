"""The application of a host: it finds the trial of a request and forwards the request to that trial's service.

A user's key determines the trial; a session's id or key names its controller process. The launcher lends the service
for the duration of the request, so that it is running and is not stopped in the meantime. The host itself serves only
the routes for keys, services, health and metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractAsyncContextManager
from itertools import chain
from typing import TYPE_CHECKING, Any

import anyio
import httpx
from attrs import field, frozen
from starlette.applications import Starlette
from starlette.types import ASGIApp

from areal_actors.cache.session import shard_of
from areal_actors.domain.accounts import User, is_user_key
from areal_actors.errors import InvalidRequest, NotFound, RequestError, Unauthorized
from areal_actors.kernel import Ref
from areal_actors.lib.exact_json import parse_object
from areal_actors.messages import Accounts, IdentifyUser
from areal_actors.proxy.access import Authenticator, read_key
from areal_actors.proxy.config import ProxyConfig
from areal_actors.proxy.exchange import Exchange, Receive, Send, Traffic
from areal_actors.proxy.forwarding import Backend, EveryPath, forward, segments_of
from areal_actors.proxy.keys import KeysEndpoint
from areal_actors.proxy.metrics import Values, gauge, process_families, read_users, send_families
from areal_actors_service.messages import (
    Hosting,
    ListServices,
    ServiceInUse,
    ServiceView,
    TrialId,
    UseService,
    UseServiceOfSession,
)

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


@frozen(kw_only=True)
class HostPeers:
    """The actors that a host asks, and the default for users whose key names no experiment or no trial."""

    hosting: Ref[Hosting]
    accounts: Ref[Accounts]
    default: TrialId
    admin_key: str = field(repr=False)
    page: ASGIApp | None = field(default=None, repr=False)
    """Answers browsers, at the paths that ``is_page_path`` accepts."""
    is_page_path: Callable[[str, str], bool] = lambda _method, _path: False

    def find_trial(self, user: User) -> TrialId:
        """Return the trial that a key of ``user`` trains. Raises ``ValueError`` for names that are not directories."""
        return TrialId(user.experiment or self.default.experiment, user.trial or self.default.trial)


def create_host_app(
    peers: HostPeers, *, config: ProxyConfig, client: httpx.AsyncClient, traffic: Traffic | None = None
) -> Starlette:
    """Create the application; ``client`` sends all requests to services and is not closed. ``config`` limits bodies."""
    return Starlette(routes=[_Host(peers, config, client, traffic)])


class _Host(EveryPath):
    def __init__(
        self, peers: HostPeers, config: ProxyConfig, client: httpx.AsyncClient, traffic: Traffic | None
    ) -> None:
        super().__init__(traffic)
        self._peers = peers
        self._config = config
        self._client = client
        self._authenticator = Authenticator(admin_key=peers.admin_key)
        self._keys = KeysEndpoint(accounts=peers.accounts, authenticator=self._authenticator, config=config)

    async def handle(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request: of a browser that looks at the page, or of a client of a service."""
        peers = self._peers
        if peers.page is not None and peers.is_page_path(scope["method"], scope["path"]):
            # Not counted as traffic: an open page must not hold up a stop.
            await peers.page(scope, receive, send)
        else:
            await super().handle(scope, receive, send)

    async def serve(self, exchange: Exchange) -> None:
        """Answer the host's own routes, and forward all other requests."""
        match exchange.method, *(segment for segment in segments_of(exchange) if segment != "v1"):
            case "GET", "health":
                services = await self._peers.hosting.ask(ListServices())
                counts = Counter(service.state.value for service in services)
                await exchange.send_json(200, {"status": "ok", "services": dict(sorted(counts.items()))})
            case "GET", "services":
                await self._list_services(exchange)
            case "GET", "metrics":
                await self._report_metrics(exchange)
            case (("GET" | "POST"), "keys"):
                await self._keys.create_or_list(exchange)
            case "DELETE", "keys", _:
                await self._keys.revoke(exchange)
            case _:
                limits = self._config
                body = await exchange.read_body(
                    max_bytes=limits.max_body_bytes, timeout_seconds=limits.body_timeout_seconds
                )
                async with exchange.cut_on_disconnect():
                    await self._forward(exchange, body)

    # ---------------------------------------------------------------------------------------------- own routes

    async def _list_services(self, exchange: Exchange) -> None:
        self._authenticator.require_admin(read_key(exchange.headers))
        services = await self._peers.hosting.ask(ListServices())
        described = [
            {
                "id": service.trial.name,
                "object": "service",
                "state": service.state.value,
                "pid": service.pid,
                "url": service.url,
                "home": service.trial.home,
                "requests": service.num_requests,
                "starts": service.num_starts,
                "last_used_at": service.last_used_at,
                "failure": service.failure,
            }
            for service in services
        ]
        await exchange.send_json(200, {"object": "list", "data": described})

    async def _report_metrics(self, exchange: Exchange) -> None:
        """Answer with the numbers of the host, and those of every running service with the label ``trial``."""
        # The numbers name users and trials.
        self._authenticator.require_admin(read_key(exchange.headers))
        services = await self._peers.hosting.ask(ListServices())
        families: dict[str, Metric] = {}

        async def scrape(service: ServiceView) -> None:
            from prometheus_client.metrics_core import Metric
            from prometheus_client.parser import text_string_to_metric_families

            try:
                response = await self._client.get(f"{service.url}/metrics", timeout=_SCRAPE_SECONDS)
                found = tuple(text_string_to_metric_families(response.raise_for_status().text))
            except (httpx.HTTPError, ValueError):
                # The service is starting or stopping, which its state says.
                return
            for family in found:
                # Prometheus refuses a second family of the same name.
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    known.add_sample(sample.name, sample.labels | {"trial": service.trial.name}, sample.value)

        async with anyio.create_task_group() as tasks:
            for service in services:
                if service.url is not None:
                    tasks.start_soon(scrape, service)
        users = await read_users(self._peers.accounts)
        for family in chain(_service_families(services), users, process_families()):
            if family.name in families:
                families[family.name].samples.extend(family.samples)
            else:
                families[family.name] = family
        await send_families(exchange, iter(families.values()))

    # ---------------------------------------------------------------------------------------------- forwarding

    async def _forward(self, exchange: Exchange, body: bytes) -> None:
        # The texts that may name a session, in the order in which services look: path, ``session_id``, key.
        key, segments = read_key(exchange.headers), segments_of(exchange)
        named = [*segments, exchange.query.get("session_id")]
        if segments and segments[-1] in _NAMING:
            found = parse_object(body).get("session_id")
            named.append(found if isinstance(found, str) else None)
        if not is_user_key(key):
            named.append(key)
        names = [name for name in named if name]
        async with await self._lender(names, key) as items:
            service: ServiceInUse | None = await anext(items, None)
            if service is None:
                raise _unknown(names, key)
            await forward(
                exchange,
                body=body,
                backends=lambda: (Backend(service.trial.name, service.url),),
                client=self._client,
                key=service.admin_key if self._authenticator.is_admin(key) else None,
            )

    async def _lender(self, names: list[str], key: str | None) -> AbstractAsyncContextManager[Any]:
        """Return the stream that lends the service: by the session that the request names, else by the user's key."""
        hosting = self._peers.hosting
        for name in names:
            if (home := shard_of(name)) is not None:
                return hosting.stream(UseServiceOfSession(home=home, name=name))
        if is_user_key(key):
            user = (await self._peers.accounts.ask(IdentifyUser(secret=key or ""))).user
            try:
                trial = self._peers.find_trial(user)
            except ValueError as error:
                raise InvalidRequest(
                    f"{error}. Ask the operator of this host to name the experiment of {user.name}."
                ) from error
            return hosting.stream(UseService(trial=trial))
        if self._authenticator.is_admin(key):
            raise InvalidRequest(
                "The admin key names no trial; use the key of a user, or name a session. GET /services lists services."
            )
        raise _unknown(names, key)


def _service_families(services: tuple[ServiceView, ...]) -> Iterator[Metric]:
    states = Counter(service.state.value for service in services)
    counts: Values = {(state,): number for state, number in states.items()}
    yield gauge("host_services", "Services by state.", counts, labels=("state",))
    requests: Values = {(service.trial.name,): service.num_requests for service in services}
    yield gauge("host_requests_in_flight", "Requests that a service is answering.", requests, labels=("trial",))
    starts: Values = {(service.trial.name,): service.num_starts for service in services}
    yield gauge("host_service_starts", "Starts of a service since the host began.", starts, labels=("trial",))


def _unknown(names: list[str], key: str | None) -> RequestError:
    """Return the error for a request that no service can be found for."""
    # As services do: a named session that does not exist is not found; a key alone is unauthorized.
    if any(name != key and shard_of(name) is not None for name in names):
        return NotFound("There is no such session here (any more); start one with the key of a user.")
    if key is None:
        return Unauthorized("No key came with this request; send the key of a user, or of a session.")
    return Unauthorized("This key opens nothing here; send the key of a user, or of a session.")


_SCRAPE_SECONDS = 2.0
"""A service that has not answered within this time is left out, so that it does not hide the others."""
_NAMING = ("export_trajectories", "set_reward", "log_metrics", "end_session", "finalize")
"""Operations whose body may name a session."""
