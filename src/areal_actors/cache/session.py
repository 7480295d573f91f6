"""The store of open sessions: who may use them, when they end, and when they are forgotten.

A session is created with an unguessable id and key. It is *live* until it ends (or is idle for too long), accepts late
rewards during a grace period after that, is then *settled*, and is forgotten when its export was acknowledged::

    create ──▶ live ──end/expire──▶ in grace ──time──▶ settled ──acknowledge──▶ forgotten
                                        └───────────acknowledge──────────────▶

``SessionStore`` is the only mutable owner of the sessions, and is itself owned by the session actor. It never waits;
the time is passed in as ``now`` (seconds of any monotonic clock), randomness as a token factory. Keys are stored as
digests. The content of a session is in its ``ConversationTree``.

A session has two keys. The key of its creator, issued or brought along, has full access. The completion key, for the
agent, gives access to the model only: an agent must not be able to reward its own answers.

Several services may stand behind one entry point. Every token that the service ``a`` issues begins with ``a.``: its
sessions are called ``task-7-a.<token>`` and opened by ``sk-a.<token>``, so that the entry point can read the service
off either, without a table that could be lost. The name is not secret and proves nothing: the session manager compares
the whole key.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

from attrs import Factory, define, field, frozen
from attrs.validators import ge, gt

from areal_actors.cache.tree import ConversationTree
from areal_actors.domain import Credential, GroupId, KeyId, SessionId, SessionRecord
from areal_actors.errors import Conflict, Forbidden, InvalidRequest, NotFound, SessionEnded, Unauthorized

_MAX_PREFIX = 48
_MIN_KEY = 8
_USER = "areal.user"
_USER_KEY = "areal.user_key"
_ROLE_KEYS = "areal.role_keys"


@frozen(kw_only=True)
class SessionSettings:
    """Lifetimes of sessions, in seconds.

    ``grace_seconds``: how long rewards are accepted after the end. ``idle_seconds``: a session without a request for
    this long (and with none in flight) is ended.
    """

    grace_seconds: float = field(default=60.0, validator=ge(0))
    idle_seconds: float = field(default=3600.0, validator=gt(0))


@frozen(kw_only=True)
class IssuedSession:
    """The credentials that the creator of a session receives once: keys are not stored and cannot be read again."""

    id: SessionId
    key: str = field(repr=False)
    completion_key: str = field(repr=False)
    role_keys: Mapping[str, str] = field(factory=dict, repr=False)


@define(eq=False, kw_only=True)
class Session:
    """One session. ``last_used_at`` and ``ended_at`` are seconds of the store's clock.

    The user who started it, if any, is part of the metadata, and is therefore stored wherever those are.
    """

    id: SessionId
    tree: ConversationTree
    key_digest: bytes = field(repr=False)
    completion_digest: bytes = field(repr=False)
    last_used_at: float
    ended_at: float | None = None
    roles_by_digest: Mapping[bytes, str] = field(
        init=False, repr=False, default=Factory(lambda self: _read_roles(self.tree), takes_self=True)
    )
    """The roles that have a completion key, by its digest. They are part of the metadata, as the user is."""

    @property
    def user(self) -> str | None:
        """The user who started it."""
        return self.tree.metadata.get(_USER)

    @property
    def user_key(self) -> KeyId | None:
        """The user's key with which it was started."""
        return self.tree.metadata.get(_USER_KEY)

    def role_of_key(self, key: str | None) -> str | None:
        """Return the role that ``key`` was issued for; ``None`` for any other key."""
        return None if key is None or not self.roles_by_digest else self.roles_by_digest.get(_digest(key))

    @property
    def is_ended(self) -> bool:
        """Whether completions are refused."""
        return self.ended_at is not None

    def snapshot(self) -> SessionRecord:
        """Return the session's current state as a frozen record."""
        return self.tree.snapshot(is_ended=self.is_ended)


class SessionStore:
    """Sessions by id and by key."""

    def __init__(self, *, token_factory: Callable[[], str], settings: SessionSettings | None = None) -> None:
        """Create a store.

        ``token_factory`` returns a new unguessable URL-safe token, such as ``secrets.token_urlsafe``.
        """
        self.settings = settings or SessionSettings()
        self._token = token_factory
        self._sessions: dict[SessionId, Session] = {}
        self._by_key: dict[bytes, SessionId] = {}

    def __len__(self) -> int:
        """Return the number of sessions that are not forgotten."""
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Iterate over the sessions that are not forgotten, oldest first."""
        return iter(self._sessions.values())

    @property
    def num_live(self) -> int:
        """The number of sessions that have not ended."""
        return sum(not session.is_ended for session in self)

    def num_live_of(self, user: str | None) -> int:
        """Return the number of sessions of one user that have not ended."""
        return sum(session.user == user and not session.is_ended for session in self)

    # ----------------------------------------------------------------------------------- opening and closing

    def create(
        self,
        task: str = "",
        *,
        now: float,
        key: str | None = None,
        group: GroupId | None = None,
        metadata: Mapping[str, Any] | None = None,
        user: str | None = None,
        user_key: KeyId | None = None,
        roles: Sequence[str] = (),
    ) -> IssuedSession:
        """Open a session whose id begins with a readable form of ``task``, with a completion key for each of ``roles``.

        A caller may bring its own ``key``, including one whose earlier session has ended. Raises ``Conflict`` if that
        key belongs to a live session, ``InvalidRequest`` if it is too short to be secret.
        """
        if key is not None and len(key) < _MIN_KEY:
            raise InvalidRequest(f"A session key needs at least {_MIN_KEY} characters; leave it out to be given one.")
        key = key or f"sk-{self._token()}"
        digest = _digest(key)
        owner = self._owner(digest)
        if owner is not None and not owner.is_ended:
            raise Conflict(f"This key belongs to session {owner.id}, which is live; end it or use another key.")
        # Otherwise the agent that knows this key would have full access to the new session.
        if owner is not None and not _opens_all(owner, digest):
            raise Conflict("This is the completion key of another session, which its agent knows; use another key.")
        prefix = re.sub(r"[^A-Za-z0-9._-]+", "-", task).strip("-.")[:_MAX_PREFIX] or "session"
        session_id = SessionId(f"{prefix}-{self._token()}")
        if session_id in self._sessions:
            raise Conflict(f"Session id {session_id} was drawn twice; the token factory is not random.")
        completion_key = f"sk-{self._token()}"
        # Merged last below, so that metadata cannot replace the name of the user.
        owner_names = {} if user is None else {_USER: user, _USER_KEY: user_key}
        role_keys = {role: f"sk-{self._token()}" for role in roles}
        # Digests, so that the journal, which stores the metadata, holds no key in plain text.
        digests = {role: _digest(role_key).hex() for role, role_key in role_keys.items()}
        role_names = {_ROLE_KEYS: digests} if digests else {}
        tree = ConversationTree(session_id, group=group, metadata={**(metadata or {}), **owner_names, **role_names})
        session = Session(
            id=session_id,
            tree=tree,
            key_digest=digest,
            completion_digest=_digest(completion_key),
            last_used_at=now,
        )
        self.restore(session)
        return IssuedSession(id=session_id, key=key, completion_key=completion_key, role_keys=role_keys)

    def restore(self, session: Session) -> None:
        """Add a session of an earlier process. If several have the same key, it opens the one restored last."""
        self._sessions[session.id] = session
        for digest in _digests(session):
            self._by_key[digest] = session.id

    def discard(self, session_id: SessionId) -> None:
        """Undo the creation of a session whose keys were not handed out."""
        self.end(session_id, 0.0)
        self.acknowledge(session_id)

    def end(self, session_id: SessionId, now: float) -> Session:
        """End a session. Ending it again changes nothing. Raises ``NotFound`` for an unknown id."""
        session = self.get(session_id)
        if session.ended_at is None:
            session.ended_at = now
        return session

    def expire(self, now: float) -> tuple[SessionId, ...]:
        """End the live sessions that were idle for too long, and return their ids. They can still be exported."""
        idle = []
        for session in self:
            # A request in flight is a use, however long its answer takes.
            is_busy = session.is_ended or session.tree.num_pending > 0
            if not is_busy and now - session.last_used_at >= self.settings.idle_seconds:
                self.end(session.id, now)
                idle.append(session.id)
        return tuple(idle)

    def acknowledge(self, session_id: SessionId) -> bool:
        """Forget an ended session whose export has arrived; return whether it was known.

        Acknowledging twice is harmless. Raises ``Conflict`` for a live session.
        """
        session = self._sessions.get(session_id)
        if session is None:
            return False
        if not session.is_ended:
            raise Conflict(f"Session {session_id} is live; end it before its export is acknowledged.")
        del self._sessions[session_id]
        for digest in _digests(session):
            if self._by_key.get(digest) == session_id:
                del self._by_key[digest]
        return True

    # ------------------------------------------------------------------------------------------------ using

    def get(self, session_id: SessionId) -> Session:
        """Return the session, live or ended. Raises ``NotFound`` for an unknown or forgotten id."""
        try:
            return self._sessions[session_id]
        except KeyError:
            raise NotFound(f"There is no session {session_id}; start one, or check the base URL.") from None

    def resolve(self, credential: Credential) -> Session:
        """Return the session that ``credential`` opens for completions, live or ended.

        A session id from a URL path is a capability: it needs no key, and any key is accepted
        unless it belongs to another session. A session id from anywhere else needs the key that owns it. A key alone
        opens its session.

        Raises ``NotFound`` for an unknown session, ``Unauthorized`` for a missing or wrong key.
        """
        digest = None if credential.key is None else _digest(credential.key)
        named = None if credential.session is None else self._sessions.get(credential.session)
        if named is not None and digest is not None and _opens(named, digest):
            # The key still opens this session, even if a later one uses it, too.
            return named
        owner = None if digest is None else self._owner(digest)
        if credential.session is None:
            return _required(owner)
        if not credential.is_capability and _required(owner).id != credential.session:
            raise Unauthorized(f"This key does not open session {credential.session}; use the key it was started with.")
        session = self.get(credential.session)
        if owner is not None:
            raise Unauthorized(f"This key belongs to another session; {session.id} was started with its own key.")
        return session

    def resolve_control(self, credential: Credential) -> Session:
        """Return the session that ``credential`` may reward and end, live or ended.

        This needs the key that the session was started with, or a caller that has control by naming the session.
        Neither the URL nor the completion key is enough, because the agent has both.

        Raises ``Forbidden`` for a completion key, ``Unauthorized`` for a URL without the key, and the errors of
        ``resolve``.
        """
        session = self.resolve(credential)
        digest = None if credential.key is None else _digest(credential.key)
        if credential.has_control or (digest is not None and _opens_all(session, digest)):
            return session
        if digest is not None and _opens(session, digest):
            raise Forbidden(
                f"This key answers completions of session {session.id}, and can neither reward nor end it. Send the "
                "api_key that start_session returned with it; agents of a run return their reward, or are given that "
                "key by rollout.openai.agents_may_reward."
            )
        raise Unauthorized(
            f"The URL of session {session.id} answers completions, and can neither reward nor end it. Send the api_key "
            "that start_session returned, as 'Authorization: Bearer <key>' or 'x-api-key'."
        )

    def for_completion(self, credential: Credential, now: float) -> Session:
        """Return the live session that ``credential`` opens, and mark it as used.

        Raises ``SessionEnded`` if it has ended, and the errors of ``resolve``.
        """
        session = self.resolve(credential)
        if session.ended_at is not None:
            raise SessionEnded(
                f"Session {session.id} ended {_age(session.ended_at, now)} ago; "
                "start a new one before sending completions."
            )
        session.last_used_at = now
        return session

    def for_log(self, credential: Credential, now: float) -> Session:
        """Return the session that ``credential`` opens for completions, as long as it accepts rewards.

        The completion key is enough, because logging does not change a reward. Raises as ``for_reward``.
        """
        return self._unsettled(self.resolve(credential), now)

    def for_reward(self, credential: Credential, now: float) -> Session:
        """Return the session that ``credential`` may reward, live or in its grace period, and mark it as used.

        Raises ``SessionEnded`` after the grace period, and the errors of ``resolve_control``.
        """
        return self._unsettled(self.resolve_control(credential), now)

    def _unsettled(self, session: Session, now: float) -> Session:
        if session.ended_at is not None and self.is_settled(session, now):
            raise SessionEnded(
                f"Session {session.id} ended {_age(session.ended_at, now)} ago and takes rewards for "
                f"{self.settings.grace_seconds:g} s only; reward before that, or lengthen the grace period."
            )
        session.last_used_at = now
        return session

    def is_settled(self, session: Session, now: float) -> bool:
        """Return whether the session has ended and accepts no more rewards, so that its export is final."""
        return session.ended_at is not None and now - session.ended_at >= self.settings.grace_seconds

    def _owner(self, digest: bytes) -> Session | None:
        """Return the session with a key of this digest.

        Only digests are compared, so timing reveals nothing about keys.
        """
        session_id = self._by_key.get(digest)
        session = None if session_id is None else self._sessions[session_id]
        return session if session is not None and _opens(session, digest) else None


def _read_roles(tree: ConversationTree) -> dict[bytes, str]:
    return {bytes.fromhex(key): role for role, key in tree.metadata.get(_ROLE_KEYS, {}).items()}


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def _digests(session: Session) -> tuple[bytes, ...]:
    """Return the digests of a session's keys."""
    return (session.key_digest, session.completion_digest, *session.roles_by_digest)


def _opens(session: Session, digest: bytes) -> bool:
    """Return whether a key with this digest opens ``session`` for completions."""
    is_own = _opens_all(session, digest) or hmac.compare_digest(session.completion_digest, digest)
    return is_own or digest in session.roles_by_digest


def _opens_all(session: Session, digest: bytes) -> bool:
    """Return whether it is the key that ``session`` was started with."""
    return hmac.compare_digest(session.key_digest, digest)


def _required(owner: Session | None) -> Session:
    if owner is None:
        raise Unauthorized(
            "No session was started with this key; pass the api_key that start_session returned. The admin key starts "
            "sessions and belongs to none."
        )
    return owner


def _age(ended_at: float, now: float) -> str:
    return f"{max(now - ended_at, 0.0):.0f} s"


SHARD_NAME = r"[a-z0-9]{1,16}"
"""Pattern of a service's name."""

_NAMED = re.compile(rf"(?:.*-|)({SHARD_NAME})\.[A-Za-z0-9_-]{{16,}}(?:@[A-Za-z0-9._-]+)?", re.DOTALL)


def create_token_factory(
    shard: str | None, token: Callable[[], str] = lambda: secrets.token_urlsafe(16)
) -> Callable[[], str]:
    """Return a factory of unguessable tokens, which begin with the name ``shard``."""
    prefix = "" if shard is None else f"{shard}."
    return lambda: f"{prefix}{token()}"


def shard_of(text: str) -> str | None:
    """Return the service's name in a session's id or key; ``None`` if there is none."""
    found = _NAMED.fullmatch(text)
    return None if found is None else found[1]
