"""Messages to the HTTP proxy, and its endpoint."""

from __future__ import annotations

from attrs import field, frozen

from areal_actors.domain import SessionId
from areal_actors.kernel import Message


class Serving:
    """Address of the HTTP proxy."""


@frozen(kw_only=True)
class Endpoint:
    """The proxy's address. ``base_url`` ends in ``/v1``."""

    url: str
    admin_key: str = field(repr=False)

    @property
    def base_url(self) -> str:
        """The base URL for an OpenAI SDK."""
        return f"{self.url}/v1"

    def session_base_url(self, session: SessionId) -> str:
        """Return the OpenAI base URL of one session."""
        return f"{self.url}/{session}/v1"


@frozen(kw_only=True)
class DescribeEndpoint(Message[Serving, Endpoint]):
    """Return the address and the administrator's key, once the socket is bound."""
