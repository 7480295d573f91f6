"""A proxy with users on a real socket, and short ways to use the keys that it gives them."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx
from attrs import frozen
from tests.proxy.plain import CHAT, bearer

from areal_actors.client import create_http_client
from areal_actors.proxy import ProxyConfig
from areal_actors_service.account_keeper import AccountKeeper
from areal_actors_service.config import UsersConfig
from areal_actors_testing.serving import ScriptedProxy, echo_script, open_scripted_proxy

MESSAGES = [{"role": "user", "content": "one two three"}]
BODY = {"messages": MESSAGES}


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@frozen(kw_only=True)
class Service:
    """A proxy with users, and a client for it."""

    proxy: ScriptedProxy
    http: httpx.AsyncClient

    async def create(self, user: str = "ada", **fields) -> dict:
        """A new key."""
        answer = await self.http.post("/keys", json={"user": user, **fields}, headers=self.proxy.admin_headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def revoke(self, key: dict) -> httpx.Response:
        return await self.http.delete(f"/keys/{key['id']}", headers=self.proxy.admin_headers)

    async def start(self, key: dict, **fields) -> httpx.Response:
        return await self.http.post("/rl/start_session", json=fields, headers=bearer(key["key"]))

    async def session(self, key: dict, **fields) -> dict:
        answer = await self.start(key, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def ask(self, secret: str | None, path: str = CHAT, **fields) -> httpx.Response:
        return await self.http.post(path, json=BODY | fields, headers={} if secret is None else bearer(secret))


@asynccontextmanager
async def served(path, *, script=echo_script, save_seconds: float = 60.0, **options):
    accounts = None if path is None else AccountKeeper(path, config=UsersConfig(save_seconds=save_seconds))
    async with (
        open_scripted_proxy(script, accounts=accounts, config=ProxyConfig(**options)) as proxy,
        create_http_client() as http,
    ):
        http.base_url = proxy.url
        yield Service(proxy=proxy, http=http)
