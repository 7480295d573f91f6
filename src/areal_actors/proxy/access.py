"""Access: the credential, role and retry evidence of a request, the user behind it, and the model that it may use.

Only the session manager knows which key opens which session and for what; ``Authenticator`` only turns a request into a
``Credential``. The URL of a session is a capability: every client that knows it may query the model in that session,
with any key or none, so the URL is never logged in full. To reward or end a session, a client needs the session's own
key, the key of its user, or the admin key.

``UserAccess`` finds out on whose behalf a request comes, whether it may be served now, and how many tokens it used. The
session manager knows who started a session; the accounts actor knows what a user may do. Without accounts, requests
have no extra cost.

``ModelSelection`` decides which model answers: the session's policy, or the trained model that a request names. A
session's key or URL, or the admin key, gives access to the trained models as well. Their answers are not turns of the
session: they appear in no tree and no export.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from hashlib import blake2b
from typing import Any

import anyio
from attrs import define, field, frozen

from areal_actors.cache.roles import ROLE_PATTERN
from areal_actors.domain import (
    Answer,
    Attempt,
    Credential,
    Delta,
    IssuedKey,
    SessionId,
    TrainedModel,
    is_model_identifier,
)
from areal_actors.domain.accounts import is_user_key
from areal_actors.errors import ArealError, InvalidRequest, NotFound, Unauthorized
from areal_actors.kernel import Ref
from areal_actors.lib.bearer_keys import read_bearer
from areal_actors.messages import (
    Accounts,
    AdmitUser,
    CheckCredential,
    DescribeOwner,
    ForgetSession,
    IdentifyUser,
    ListModels,
    ModelInUse,
    Models,
    OpenSession,
    Sessions,
    TokensSampled,
    UseModel,
)
from areal_actors.proxy.exchange import Caller, Exchange

AGENT_HEADER = b"x-areal-agent"
"""A header that names the requesting agent of a multi-agent episode."""
_RETRY_COUNT = b"x-stainless-retry-count"
_IDEMPOTENCY_KEY = b"idempotency-key"
_MAX_KEY = 255
_MAX_DIGITS = 4
_FORGET_SECONDS = 5.0
_NEEDS_SESSION = (
    "This is the key of a user. It answers completions, which are not trained; for a reward, start a session "
    "(POST /rl/start_session, or AgentSession) and use the key that it returns."
)


def create_admin_key() -> str:
    """Return a random admin key with 256 bits of entropy."""
    return f"sk-admin-{secrets.token_urlsafe(32)}"


def read_key(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the key of a request: ``Authorization: Bearer`` as OpenAI's clients send it, else ``x-api-key``."""
    bearer = read_bearer(headers.get(b"authorization", b"").decode("latin-1"))
    return bearer or headers.get(b"x-api-key", b"").strip().decode("latin-1") or None


def read_role(exchange: Exchange) -> str | None:
    """Return the role of the agent that the URL names, or else the header. Raises ``InvalidRequest``."""
    role = exchange.role
    if role is None:
        return exchange.headers.get(AGENT_HEADER, b"").decode("latin-1") or None
    if not re.fullmatch(ROLE_PATTERN, role):
        raise InvalidRequest(f"The URL has the role {role!r}; use letters, digits, '.', '_' and '-'.")
    return role


def read_attempt(headers: Mapping[bytes, bytes], operation: str, body: bytes) -> Attempt | None:
    """Return the retry evidence in ``headers`` with a digest of the request, or ``None`` if there is no evidence.

    The evidence is an idempotency key and the number of earlier attempts, which the SDKs of OpenAI and Anthropic send.
    A request of a client that sends neither header is always a new request.

    The first attempt has a digest as well (about 1 µs per KiB), because its retry must be matched to it.

    Raises:
        InvalidRequest: the idempotency key is too long to be stored.
    """
    number, key = headers.get(_RETRY_COUNT, b""), headers.get(_IDEMPOTENCY_KEY, b"").strip()
    if not number and not key:
        return None
    if len(key) > _MAX_KEY:
        raise InvalidRequest(f"The Idempotency-Key has more than {_MAX_KEY} characters; shorten it.")
    digest = blake2b(operation.encode() + b"\0", digest_size=16)
    digest.update(body)
    return Attempt(
        fingerprint=digest.hexdigest(),
        number=int(number) if number.isdigit() and len(number) <= _MAX_DIGITS else 0,
        idempotency_key=key.decode("latin-1") or None,
    )


@frozen(kw_only=True)
class Authenticator:
    """Turns keys and session names into credentials. ``session_urls`` says whether a session's URL alone opens it.

    With ``open_sessions``, every client may start sessions, and therefore use the trained models without one.
    """

    admin_key: str = field(repr=False)
    session_urls: bool = True
    open_sessions: bool = False

    def is_admin(self, key: str | None) -> bool:
        """Return whether ``key`` is the admin key. The comparison takes constant time."""
        return key is not None and hmac.compare_digest(key.encode(), self.admin_key.encode())

    def require_admin(self, key: str | None) -> None:
        """Raise ``Unauthorized`` unless ``key`` is the admin key."""
        if not self.is_admin(key):
            raise Unauthorized("This needs the proxy's admin key, as 'Authorization: Bearer <key>'.")

    def identify(self, exchange: Exchange, named: object = None) -> Credential:
        """Return the credential of a request, whose body names the session ``named``. Raises ``Unauthorized``."""
        named = named or exchange.query.get("session_id")
        return self.credential(
            key=read_key(exchange.headers),
            in_path=exchange.session,
            in_request=named if isinstance(named, str) else None,
        )

    def credential(self, *, key: str | None, in_path: str | None, in_request: str | None) -> Credential:
        """Return the credential of a request.

        Args:
            key: the key that was sent with it.
            in_path: the session that its URL names.
            in_request: the session that its query or body names; it also needs the key that owns the session.

        Raises:
            Unauthorized: there is neither a key nor the URL of a session, and the service needs one of them.
        """
        session = in_path or in_request
        if session is not None and self.is_admin(key):
            return Credential(session=SessionId(session), is_capability=True, has_control=True)
        if in_path is not None and self.session_urls:
            return Credential(session=SessionId(in_path), key=key, is_capability=True)
        if key is None and not self.open_sessions:
            raise Unauthorized(
                "No key came with this request; send the session's key as 'Authorization: Bearer <key>' or 'x-api-key'."
            )
        return Credential(session=None if session is None else SessionId(session), key=key, is_capability=False)


@define(kw_only=True)
class RequestUsage:
    """The tokens that one request of a user sampled. ``credential`` opens the session that the request is about."""

    credential: Credential
    num_deltas: int = 0
    num_tokens: int = 0

    def count(self, item: Any) -> None:
        """Count the tokens of a stream's item. A stream that is cut counts one token per delta."""
        if isinstance(item, Answer):
            # The caller for whom an answer was sampled has paid for it.
            self.num_tokens += 0 if item.is_repeated else len(item.completion.token_ids)
            # The finished answer has the exact count, which replaces the estimate of one token per delta.
            self.num_deltas = 0
        elif isinstance(item, Delta):
            self.num_deltas += 1

    @property
    def num_used(self) -> int:
        """Tokens that count towards the user's quota."""
        return self.num_tokens + self.num_deltas


@frozen(kw_only=True)
class UserAccess:
    """The check between the routes and the sessions. Without ``accounts`` there are no users."""

    sessions: Ref[Sessions]
    authenticator: Authenticator
    accounts: Ref[Accounts] | None = None

    async def identify(self, secret: str | None) -> IssuedKey | None:
        """Return the user with this key, or ``None`` for a key that is not a user's.

        Raises:
            Unauthorized: the user key is not valid.
        """
        if self.accounts is None or secret is None or not is_user_key(secret):
            return None
        return await self.accounts.ask(IdentifyUser(secret=secret))

    async def name_caller(self, exchange: Exchange) -> Caller:
        """Return the session that a request's URL or key opens, and its user, for the access log."""
        try:
            issued = await self.identify(read_key(exchange.headers))
            if issued is not None:
                return Caller(user=issued.user.name)
            credential = self.authenticator.identify(exchange)
            owner = await self.sessions.ask(DescribeOwner(credential=credential))
        except ArealError:
            # The request itself is refused, or needs no session.
            return Caller()
        return Caller(session=owner.session, user=owner.user)

    async def authorise(self, credential: Credential) -> Credential:
        """Return the credential with which to serve a request other than a completion.

        Raises:
            Unauthorized: the key is not valid, or it is a user's key without a session.
            NotFound: the user has no such session.
        """
        if self.accounts is None or self._is_admin(credential):
            return credential
        _, found = await self._resolve(self.accounts, credential, is_counted=False)
        if found is None:
            raise Unauthorized(_NEEDS_SESSION)
        return found

    @asynccontextmanager
    async def admit(self, credential: Credential, *, is_counted: bool = True) -> AsyncIterator[RequestUsage]:
        """Serve a request within the block, and account for the tokens that it sampled.

        A user's key without a session gets a session for this request only, which is forgotten afterwards and never
        trained.

        Raises:
            Unauthorized: the key is not valid, or does not open this session.
            QuotaExceeded: the user's quota is used up.
        """
        if self.accounts is None or self._is_admin(credential):
            yield RequestUsage(credential=credential)
            return
        user, found = await self._resolve(self.accounts, credential, is_counted=is_counted)
        temporary = None if found is not None else await self.sessions.ask(OpenSession(task="inference"))
        if temporary is not None:
            found = Credential(session=temporary.session, is_capability=True)
        assert found is not None
        usage = RequestUsage(credential=found)
        try:
            yield usage
        finally:
            # Shielded: a client that disconnects is charged for what was sampled until then, and leaves no session.
            with anyio.move_on_after(_FORGET_SECONDS, shield=True):
                try:
                    if user is not None and usage.num_used:
                        await self.accounts.tell(TokensSampled(user=user, num_tokens=usage.num_used))
                finally:
                    if temporary is not None:
                        await self.sessions.tell(ForgetSession(session=temporary.session))

    async def _resolve(
        self, accounts: Ref[Accounts], credential: Credential, *, is_counted: bool
    ) -> tuple[str | None, Credential | None]:
        """Return the user's name and the session's credential, which is ``None`` for a user's key without a session."""
        issued = await self.identify(credential.key)
        if issued is not None:
            found = None
            if credential.session is not None:
                await self.check_owner(credential.session, issued)
                found = Credential(session=credential.session, is_capability=True, has_control=True)
            if is_counted:
                await accounts.ask(AdmitUser(key=issued.key.id))
            return issued.user.name, found
        try:
            owner = await self.sessions.ask(DescribeOwner(credential=credential))
        except (NotFound, Unauthorized):
            # The sessions refuse it with the reason, unless it asks for a trained model, which takes no session.
            return None, credential
        if owner.user_key is not None:
            await accounts.ask(AdmitUser(key=owner.user_key, is_counted=is_counted))
        return owner.user, credential

    def _is_admin(self, credential: Credential) -> bool:
        # The administrator may control every session, so there is no owner to check.
        return credential.has_control or self.authenticator.is_admin(credential.key)

    async def check_owner(self, session: SessionId, user: IssuedKey) -> None:
        """Raise ``NotFound`` unless the session is the user's."""
        owner = None
        with suppress(NotFound):
            owner = await self.sessions.ask(DescribeOwner(credential=Credential(session=session, is_capability=True)))
        if owner is None or owner.user != user.user.name:
            # The same words for another user's session and for one that does not exist, so that the answer reveals
            # neither.
            raise NotFound(f"You have no session {session}; start one, or check its name.")


@frozen(kw_only=True)
class ModelSelection:
    """Selects the model for a request. Without ``models``, it is always the policy."""

    sessions: Ref[Sessions]
    authenticator: Authenticator
    models: Ref[Models] | None = None

    @asynccontextmanager
    async def select(self, name: object, credential: Credential) -> AsyncIterator[ModelInUse | None]:
        """Borrow the model called ``name`` for one request; yields ``None`` if there is none, and the policy answers.

        Raises:
            RequestError: the credential is not valid, or the model cannot be opened.
        """
        if self.models is None or not isinstance(name, str) or not is_model_identifier(name):
            yield None
            return
        await self._check(credential)
        async with self.models.stream(UseModel(name=name)) as items:
            yield await anext(items, None)

    async def list(self) -> tuple[TrainedModel, ...]:
        """Return the models that a request can name."""
        return () if self.models is None else await self.models.ask(ListModels())

    async def list_for(self, credential: Credential) -> tuple[TrainedModel, ...]:
        """Return the models that this credential can use. Raises ``RequestError`` for an invalid credential."""
        await self._check(credential)
        return await self.list()

    async def _check(self, credential: Credential) -> None:
        if not (self.authenticator.open_sessions or self.authenticator.is_admin(credential.key)):
            await self.sessions.ask(CheckCredential(credential=credential))
