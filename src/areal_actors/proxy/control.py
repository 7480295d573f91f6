"""Routes other than completions: start, reward, end and export sessions; capacity, models and health.

Arguments are taken from a JSON body, from the query, or from both; the body takes precedence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

import anyio
from attrs import frozen

from areal_actors.cache.roles import ROLE_PATTERN
from areal_actors.domain import (
    MAX_NUMBERS,
    Credential,
    GroupId,
    InteractionId,
    IssuedKey,
    SessionId,
    TrainedModel,
    merge_numbers,
)
from areal_actors.domain.accounts import is_user_key
from areal_actors.errors import InvalidRequest, RequestError, Unauthorized
from areal_actors.interchange.episodes import ARRAYS_TYPE, format_episode, pack_arrays
from areal_actors.kernel import Ref
from areal_actors.messages import (
    Capacity,
    ClaimPermit,
    DescribeEngine,
    DescribeSessions,
    EndSession,
    Exports,
    ExportSession,
    Generation,
    Intake,
    LogNumbers,
    OpenSession,
    ReservePermit,
    SessionOpened,
    Sessions,
    SetReward,
    SettlePermit,
    StartSession,
)
from areal_actors.proxy.access import Authenticator, ModelSelection, UserAccess, read_key
from areal_actors.proxy.config import ProxyConfig
from areal_actors.proxy.dialects.fields import OBJECT, TEXT, Schema, integer, number, read, unknown, wrong
from areal_actors.proxy.exchange import Exchange, Traffic
from areal_actors.proxy.metrics import try_ask

CONTEXT_NAMES = ("max_model_len", "context_length", "context_window", "max_input_tokens")
"""The names under which clients of vLLM, OpenRouter, Groq and Anthropic read how many tokens a model takes."""
_SETTLE_SECONDS = 5.0
_MAX_GROUP = 4096
"""Maximum number of sessions in a group."""
_MAX_ROLES = 16
_NUMBERS = frozenset({"reward", "final_reward", "discount"})
_COUNTS = {
    "group_size": integer(1, _MAX_GROUP),
    "position": integer(0, 2**31 - 1),
    "member": integer(0, _MAX_GROUP - 1),
    "seed": integer(-(2**63), 2**63 - 1),
}
_DISCOUNT = number(0, 1)
_AMOUNT: Schema = {"type": ["number", "string", "boolean"]}
ARGUMENTS: Mapping[str, Mapping[str, Schema]] = {
    "rl/start_session": {
        "task_id": TEXT.schema,
        "api_key": {**TEXT.schema, "minLength": 8},
        "group_id": TEXT.schema,
        "roles": {"type": "array", "items": {"type": "string", "pattern": f"^{ROLE_PATTERN}$"}, "maxItems": _MAX_ROLES},
        **{name: kind.schema for name, kind in _COUNTS.items()},
    },
    "rl/set_reward": {
        "reward": _AMOUNT,
        "interaction_id": TEXT.schema,
        "completion_id": TEXT.schema,
        "session_id": TEXT.schema,
    },
    "rl/log_metrics": {
        "metrics": {
            "type": "object",
            "propertyNames": {"pattern": "^[A-Za-z0-9_.-]{1,64}$"},
            "additionalProperties": {"type": ["number", "boolean"]},
            "minProperties": 1,
            "maxProperties": MAX_NUMBERS,
        },
        "session_id": TEXT.schema,
    },
    "rl/end_session": {"final_reward": {"type": [*_AMOUNT["type"], "null"]}, "session_id": TEXT.schema},
    "rl/finalize": {"final_reward": _AMOUNT, "session_id": TEXT.schema},
    "export_trajectories": {"session_id": TEXT.schema, "discount": _DISCOUNT.schema, "style": TEXT.schema},
}
"""Arguments of the routes, in the body or in the query, as JSON schemas."""
# Clients send one document, such as reward and final_reward, to several routes, so each accepts the names of all.
_KNOWN_ARGUMENTS = frozenset().union(*ARGUMENTS.values())


@frozen(kw_only=True)
class ControlEndpoints:
    """The handlers, one method per route."""

    sessions: Ref[Sessions]
    exports: Ref[Exports]
    capacity: Ref[Capacity]
    generation: Ref[Generation] | None
    intake: Ref[Intake] | None
    authenticator: Authenticator
    selection: ModelSelection
    config: ProxyConfig
    access: UserAccess
    traffic: Traffic
    started_at: int
    """When the proxy started, in seconds since 1970."""

    # ------------------------------------------------------------------------------------------ administration

    async def grant_capacity(self, exchange: Exchange) -> None:
        """Reserve a place for a session that will be started soon."""
        self.authenticator.require_admin(read_key(exchange.headers))
        view = await self.capacity.ask(ReservePermit())
        await exchange.send_json(200, {"capacity": view.available, "reserved": view.reserved})

    async def start_session(self, exchange: Exchange) -> None:
        """Open a session: with an intake, in its group, to be trained; otherwise under a separate permit."""
        key = read_key(exchange.headers)
        user = None if self.authenticator.is_admin(key) else await self.access.identify(key)
        if user is None and not self.authenticator.is_admin(key) and not self.config.open_sessions:
            raise Unauthorized(
                "Starting a session needs a user's key or the admin key, as 'Authorization: Bearer <key>'."
            )
        wanted = _read_start(await self._arguments(exchange, "rl/start_session"), user)
        if self.authenticator.is_admin(wanted.api_key):
            # The admin key would open the session as well, and every plain request of the administrator would become
            # one of its turns.
            raise InvalidRequest("api_key is the proxy's admin key; choose another, or leave it out.", param="api_key")
        if self.intake is not None:
            opened = await self.intake.ask(wanted)
        else:
            permit = await self.capacity.ask(ClaimPermit(holder=wanted.task))
            opened = await self._open(wanted, permit.id)
        await exchange.send_json(
            200,
            {
                "session_id": opened.session,
                "api_key": opened.api_key,
                "completion_key": opened.completion_key,
                "role_keys": dict(opened.role_keys),
            },
        )

    async def _open(self, wanted: StartSession, permit: int) -> SessionOpened:
        group = None if wanted.group is None else GroupId(wanted.group)
        try:
            return await self.sessions.ask(
                OpenSession(
                    task=wanted.task,
                    api_key=wanted.api_key,
                    group=group,
                    permit=permit,
                    metadata=wanted.metadata,
                    user=wanted.user,
                    user_key=wanted.user_key,
                    max_live=wanted.max_live,
                    is_durable=True,
                    roles=wanted.roles,
                )
            )
        except BaseException:
            # Also on cancellation: the permit was claimed for a session that does not exist, and nothing else would
            # return it.
            with anyio.move_on_after(_SETTLE_SECONDS, shield=True):
                await self.capacity.tell(SettlePermit(permit=permit, is_accepted=False))
            raise

    async def export_trajectories(self, exchange: Exchange) -> None:
        """Send the training rows of a session, as a JSON document or as arrays.

        A user's key exports only that user's sessions.
        """
        user = await self.access.identify(key := read_key(exchange.headers))
        if user is None:
            self.authenticator.require_admin(key)
        arguments = await self._arguments(exchange, "export_trajectories")
        session = exchange.session or read(arguments, "session_id", TEXT)
        if session is None:
            raise InvalidRequest("session_id is missing; say which session to export.", param="session_id")
        if user is not None:
            await self.access.check_owner(SessionId(session), user)
        discount = _read_float(arguments, "discount")
        if discount is not None:
            discount = _DISCOUNT.read(discount, "discount")
        message = ExportSession(session=SessionId(session), discount=discount, style=read(arguments, "style", TEXT))
        episode = await self.exports.ask(message)
        # The binary form is sent to clients that accept it and name it before JSON.
        accepted = exchange.headers.get(b"accept", b"").decode("latin-1").lower()
        types = [part.partition(";")[0].strip() for part in accepted.split(",")]
        if next((name for name in types if name in {ARRAYS_TYPE, "application/json"}), None) == ARRAYS_TYPE:
            await exchange.send_document(200, pack_arrays(episode), content_type=ARRAYS_TYPE.encode())
        else:
            await exchange.send_json(200, format_episode(episode))

    # ------------------------------------------------------------------------------------------------ sessions

    async def set_reward(self, exchange: Exchange) -> None:
        """Reward one interaction, or the last completed one."""
        arguments = await self._arguments(exchange, "rl/set_reward")
        names = {read(arguments, name, TEXT) or "" for name in ("interaction_id", "completion_id")} - {""}
        if len(names) > 1:
            raise InvalidRequest("interaction_id and completion_id name two answers; send one.", param="completion_id")
        interaction = next(iter(names), None)
        rewarded = await self.sessions.ask(
            SetReward(
                credential=await self._credential(exchange, arguments),
                reward=_required_float(arguments, "reward"),
                interaction=None if interaction is None else InteractionId(interaction),
            )
        )
        await exchange.send_json(200, {"status": "success", "interaction_id": rewarded})

    async def log_metrics(self, exchange: Exchange) -> None:
        """Log named numbers of the session."""
        arguments = await self._arguments(exchange, "rl/log_metrics")
        numbers = merge_numbers({}, read(arguments, "metrics", OBJECT, {}))
        if not numbers:
            raise InvalidRequest("metrics is missing; send an object from names to numbers.", param="metrics")
        await self.sessions.ask(LogNumbers(credential=await self._credential(exchange, arguments), numbers=numbers))
        await exchange.send_json(200, {"status": "success"})

    async def end_session(self, exchange: Exchange) -> None:
        """End a session, with or without a final reward."""
        arguments = await self._arguments(exchange, "rl/end_session")
        await self._end(exchange, arguments, _read_float(arguments, "final_reward"))

    async def finalize(self, exchange: Exchange) -> None:
        """Reward the last completed interaction and end the session."""
        arguments = await self._arguments(exchange, "rl/finalize")
        await self._end(exchange, arguments, _required_float(arguments, "final_reward"))

    async def _end(self, exchange: Exchange, arguments: Mapping[str, Any], final_reward: float | None) -> None:
        credential = await self._credential(exchange, arguments)
        closed = await self.sessions.ask(EndSession(credential=credential, final_reward=final_reward))
        await exchange.send_json(
            200,
            {
                "status": "success",
                "message": f"Session {closed.session} ended.",
                "interaction_count": closed.num_interactions,
            },
        )

    # -------------------------------------------------------------------------------------------------- status

    async def list_models(self, exchange: Exchange) -> None:
        """List the policy, and the trained models if the client may use them."""
        listed = await self._models(exchange)
        page = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"], "has_more": False}
        await exchange.send_json(200, {"object": "list", "data": listed, **page})

    async def retrieve_model(self, exchange: Exchange) -> None:
        """Describe one model. A name that is not listed is the policy's: it answers requests for any other model."""
        listed = await self._models(exchange)
        named = next((entry for entry in listed if entry["id"] == exchange.item), listed[0])
        await exchange.send_json(200, named | {"id": exchange.item, "display_name": exchange.item})

    async def _models(self, exchange: Exchange) -> list[dict[str, Any]]:
        model, lengths = "policy", dict[str, int]()
        if self.generation is not None:
            info = (await self.generation.ask(DescribeEngine())).info
            model, lengths = PurePath(info.model).name, dict.fromkeys(CONTEXT_NAMES, info.context_length)
        trained: tuple[TrainedModel, ...] = ()
        key = read_key(exchange.headers)
        # The policy is listed to every client, with any key or none.
        with suppress(RequestError):
            if await self.access.identify(key) is not None:
                trained = await self.selection.list()
            else:
                trained = await self.selection.list_for(self.authenticator.identify(exchange))
        # A trained model is opened when it is asked for, and its length is not known before.
        others = (_format_model(found.name, int(found.saved_at)) for found in trained)
        return [_format_model(model, self.started_at) | lengths, *others]

    async def report_health(self, exchange: Exchange) -> None:
        """Answer 200 while requests can be answered, 503 otherwise, with the reason."""
        answer: dict[str, Any] = {"status": "ok", "requests": len(self.traffic)}
        if self.traffic.is_draining:
            answer["status"] = "stopping"
        elif (view := await try_ask(self.sessions, DescribeSessions())) is None:
            answer |= {"status": "unavailable", "reason": "sessions_unreachable"}
        elif view.num_failed_journals:
            # Not why: this route needs no key, and the reason has paths. The log has it.
            answer |= {"status": "unavailable", "reason": "journal_failed"}
        await exchange.send_json(200 if answer["status"] == "ok" else 503, answer)

    async def report_life(self, exchange: Exchange) -> None:
        """Answer 200, also while the proxy drains: a supervisor that restarted it then would cut its answers."""
        await exchange.send_json(200, {"status": "ok", "requests": len(self.traffic)})

    # ---------------------------------------------------------------------------------------------- arguments

    async def _arguments(self, exchange: Exchange, operation: str) -> dict[str, Any]:
        """Return the arguments of ``operation``.

        Unknown names are refused as in completions: with ``group_idd`` or ``completionid`` the route would succeed, and
        the session would be in no group, or the reward at another answer.
        """
        limits = self.config
        body = await exchange.read_json(max_bytes=limits.max_body_bytes, timeout_seconds=limits.body_timeout_seconds)
        query: dict[str, Any] = dict(exchange.query)
        for name in _NUMBERS & query.keys():
            # Query parameters are text. In a body, only a JSON number is a number.
            with suppress(ValueError):
                query[name] = float(query[name])
        arguments = {**query, **body}
        for name, value in arguments.items():
            if not (name in _KNOWN_ARGUMENTS or name in limits.inert_parameters or value in (None, [], {})):
                raise unknown(name, ARGUMENTS[operation], operation)
        return arguments

    async def _credential(self, exchange: Exchange, arguments: Mapping[str, Any]) -> Credential:
        named = read(arguments, "session_id", TEXT)
        return await self.access.authorise(self.authenticator.identify(exchange, named))


def _format_model(name: str, created: int) -> dict[str, Any]:
    """Return a model with the fields that the SDKs of OpenAI and Anthropic require."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "areal_actors",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
    }


def _read_start(arguments: Mapping[str, Any], user: IssuedKey | None) -> StartSession:
    if is_user_key(read(arguments, "api_key", TEXT)):
        raise InvalidRequest("api_key has the form of a user's key; choose another.", param="api_key")
    names = [] if arguments.get("roles") is None else arguments["roles"]
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_list or len(names) > _MAX_ROLES or not all(re.fullmatch(ROLE_PATTERN, name) for name in names):
        raise InvalidRequest(
            f"roles must be a list of at most {_MAX_ROLES} names, each of letters, digits, '.', '_' and '-'.",
            param="roles",
        )
    group, size = read(arguments, "group_id", TEXT), _read_count(arguments, "group_size")
    if group is None and size is not None:
        raise InvalidRequest("group_size needs a group_id, which its sessions have in common.", param="group_size")
    metadata = {} if user is None else {"experiment": user.user.experiment, "trial": user.user.trial}
    return StartSession(
        task=read(arguments, "task_id", TEXT) or "session",
        api_key=read(arguments, "api_key", TEXT),
        group=group,
        group_size=size,
        position=_read_count(arguments, "position"),
        member=_read_count(arguments, "member"),
        seed=_read_count(arguments, "seed"),
        metadata={name: value for name, value in metadata.items() if value is not None},
        user=None if user is None else user.user.name,
        user_key=None if user is None else user.key.id,
        max_live=None if user is None else user.user.quotas.max_sessions,
        roles=tuple(dict.fromkeys(names)),
    )


def _read_count(arguments: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number, also from text, because query parameters are text."""
    value = arguments.get(name)
    with suppress(ValueError):
        # Text that is not a number stays text, and is refused as such.
        value = int(value) if isinstance(value, str) else value
    return read({name: value}, name, _COUNTS[name])


def _read_float(arguments: Mapping[str, Any], name: str) -> float | None:
    """Return a number. ``true`` and text are refused: as a reward they would hide a mistake of the client."""
    value = arguments.get(name)
    if value is None:
        return None
    with suppress(OverflowError):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            # Values that are not finite pass: the sessions reject them.
            return float(value)
    raise wrong(name, "a number", value)


def _required_float(arguments: Mapping[str, Any], name: str) -> float:
    value = _read_float(arguments, name)
    if value is None:
        raise InvalidRequest(f"{name} is missing; send a number.", param=name)
    return value
