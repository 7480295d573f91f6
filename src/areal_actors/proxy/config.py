"""Settings of the proxy."""

from __future__ import annotations

from enum import StrEnum

from attrs import field, frozen
from attrs.validators import ge, gt, le

from areal_actors.lib.settings import COMMON, check_host, constant
from areal_actors.proxy.dialects.blocks import UnsupportedBlocks
from areal_actors.proxy.dialects.fields import DEFAULT_MAX_TOKENS


class HttpServer(StrEnum):
    """The library that serves HTTP on asyncio. On trio it is Hypercorn."""

    UVICORN = "uvicorn"
    HYPERCORN = "hypercorn"


@frozen(kw_only=True)
class HonourStore:
    """For each route, whether ``store: false`` keeps an answer from being trained."""

    chat: bool = True
    responses: bool = False
    """Off by default: clients of Responses send ``store: false`` by habit, because they keep the history themselves."""


@frozen(kw_only=True)
class ProxyConfig:
    """Settings of the proxy: its address, who may use it, and its limits."""

    host: str = field(default="127.0.0.1", validator=check_host, metadata=COMMON)
    """Address to listen on. Any address except loopback needs an ``admin_key``."""
    port: int = field(default=0, validator=[ge(0), le(65535)], metadata=COMMON)
    """Port to listen on; 0 takes any free port."""
    public_host: str | None = None
    """Name under which agents reach this machine, if it differs from ``host``."""
    server: HttpServer = HttpServer.UVICORN
    """The library that serves HTTP on asyncio; on trio it is always Hypercorn."""
    admin_key: str | None = field(default=None, repr=False, metadata=COMMON)
    """Key for the routes that start and export sessions. A random one is generated if it is not set."""
    session_urls: bool = True
    """Whether the URL of a session is enough to use it. If not, the session's key is needed as well."""
    open_sessions: bool = False
    """Whether clients on this machine's loopback may start sessions without a key; refused on other hosts."""
    max_body_bytes: int = field(default=16 * 2**20, validator=gt(0))
    body_timeout_seconds: float = constant(60.0)
    keep_alive_seconds: float = constant(15.0)
    """A stream that is silent for this long sends a comment, so that intermediaries do not close it as idle."""
    drain_seconds: float = field(default=2.0, validator=ge(0))
    """How long requests in flight may continue when the proxy stops."""
    default_max_tokens: int = field(default=DEFAULT_MAX_TOKENS, validator=gt(0))
    """Limit of new tokens if a client sets none."""
    inert_parameters: tuple[str, ...] = ()
    """Names of request parameters, in addition to the known ones, to accept and ignore."""
    honour_store: HonourStore = field(factory=HonourStore)
    access_log: bool = False
    """Whether each request is logged: time, route, session (shortened), client, status and seconds; never a key."""
    unsupported_blocks: UnsupportedBlocks | None = None
    """Images and files, which the model cannot read: refused, or described in words in their place.

    By default they are refused before the first call or result of the conversation, and described from there on.
    """
