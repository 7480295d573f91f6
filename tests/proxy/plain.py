"""What a plain HTTP client sends."""

from __future__ import annotations

import anyio

BODY = {"model": "m", "messages": [{"role": "user", "content": "one two three"}]}
CHAT = "/v1/chat/completions"


def bearer(key):
    return {"authorization": f"Bearer {key}"}


async def start(http, proxy, **body):
    response = await http.post("/rl/start_session", json=body, headers=proxy.admin_headers)
    assert response.status_code == 200, response.text
    return response.json()


async def connect(proxy):
    return await anyio.connect_tcp("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
