"""Settings of the proxy."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, gt, le

from areal_actors.proxy.sampling_fields import DEFAULT_MAX_TOKENS

__all__ = ["HonourStore", "ProxyConfig"]


@frozen(kw_only=True)
class HonourStore:
    """Whether ``store: false`` keeps an answer from being trained, by route."""

    chat: bool = True
    responses: bool = False
    """Clients of Responses send it by habit, because they keep the history themselves."""


@frozen(kw_only=True)
class ProxyConfig:
    """Where the proxy listens, who may use it, and what it takes."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs an ``admin_key``."""
    port: int = field(default=0, validator=[ge(0), le(65535)])
    """0 takes any free port."""
    public_host: str | None = None
    """Name under which agents reach this machine, where it is not ``host``."""
    num_processes: int = field(default=1, validator=ge(1))
    """Proxies of a service that share its port; all but one are processes of their own."""
    admin_key: str | None = field(default=None, repr=False)
    """Opens the routes that start and export sessions. A random one is made without it."""
    session_urls: bool = True
    """Whether the URL of a session opens it. If not, its key is needed beside it."""
    open_sessions: bool = False
    """Whether sessions start without a key, for whoever reaches this machine's loopback; refused on other hosts."""
    max_body_bytes: int = field(default=16 * 2**20, validator=gt(0))
    body_timeout_seconds: float = field(default=60.0, validator=gt(0))
    keep_alive_seconds: float = field(default=15.0, validator=gt(0))
    """A stream that is silent for so long carries a comment, so that nothing between takes it for dead."""
    drain_seconds: float = field(default=2.0, validator=ge(0))
    """How long requests in flight may go on when the proxy stops."""
    default_max_tokens: int = field(default=DEFAULT_MAX_TOKENS, validator=gt(0))
    """New tokens where a client names no bound."""
    inert_parameters: tuple[str, ...] = ()
    """Names of request parameters, beside the known ones, to accept and ignore."""
    honour_store: HonourStore = field(factory=HonourStore)
