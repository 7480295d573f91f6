"""Agents that act in an environment served by OpenEnv: ``areal_actors_environments.openenv:OpenEnvAgent``.

The model sees the observation of ``reset`` and acts until the environment is done. It acts by tools, or, where an
action has one text, by what it says. A server of MCP tools is asked which tools it has; elsewhere, ``step`` is the only
one. ``OpenEnvAgent`` is an agent as any other; its ``data`` is what ``reset`` is given.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from importlib.util import find_spec
from typing import Any

import httpx
from attrs import field, frozen

from areal_actors.errors import EpisodeError, InvalidRequest, WorkflowError
from areal_actors.workflows import context as workflow_context

INSTALL = "pip install 'areal-actors-environments[openenv]'"

_STEP = "step"
_MCP_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the action that servers of MCP tools publish, which does not say what the tools are."""
_OWN_FIELDS = ("metadata", "type")
"""Fields of every action, which no model has to set."""
_INVALID = "VALIDATION_ERROR"


class Actions(StrEnum):
    """The way in which the model acts."""

    AUTO = "auto"
    """As text where an action is one text, and by tools elsewhere."""
    TEXT = "text"
    TOOLS = "tools"


@frozen(kw_only=True)
class Form:
    """The form of actions: the field that the model's text becomes, or the tools that it may call."""

    text_field: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    """In OpenAI's format."""
    are_mcp: bool = False
    """Whether the tools are those of the server, instead of ``step``."""


def seeds(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield problems that differ by the seed of ``reset``.

    ``dataset: {python: "areal_actors_environments.openenv:seeds"}``.
    """
    for number in range(seed, seed + num):
        yield {"seed": number}


def choose_form(schema: Mapping[str, Any], wanted: Actions, tools: Sequence[Mapping[str, Any]] | None = None) -> Form:
    """Return the form of the actions that ``schema`` describes; ``tools`` are those of a server of MCP tools.

    Raises ``ValueError`` if the model is to act by text and an action is not one text.
    """
    if tools is not None:
        functions = [
            {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
            }
            for tool in tools
        ]
        return Form(tools=[{"type": "function", "function": function} for function in functions], are_mcp=True)
    properties = {name: content for name, content in schema.get("properties", {}).items() if name not in _OWN_FIELDS}
    required = [name for name in schema.get("required", ()) if name in properties]
    is_text = len(required) == 1 and properties[required[0]].get("type") == "string"
    if wanted is Actions.TEXT and not is_text:
        raise ValueError(f"an action has the fields {', '.join(properties) or 'none'}, and is not one text")
    if is_text and wanted is not Actions.TOOLS:
        return Form(text_field=required[0])
    parameters = {"type": "object", "properties": properties, "required": required}
    parameters |= {key: schema[key] for key in ("$defs",) if key in schema}
    function = {"name": _STEP, "description": schema.get("description", "Act."), "parameters": parameters}
    return Form(tools=[{"type": "function", "function": function}])


def parse_call(call: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """Return the action of a tool call. Raises ``ValueError`` without a tool, or if its arguments are not an object."""
    name, text = call["function"]["name"], call["function"]["arguments"]
    names = [tool["function"]["name"] for tool in form.tools]
    if name not in names:
        raise ValueError(f"there is no tool {name}; there are {', '.join(names)}")
    arguments = json.loads(text or "{}")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name} are not an object")  # noqa: TRY004 - said to the model
    return {"type": "call_tool", "tool_name": name, "arguments": arguments} if form.are_mcp else arguments


def describe(observation: Any) -> str:
    """Return an observation as text: its only field if that is one, or JSON."""
    content = observation
    if isinstance(observation, Mapping):
        content = {name: value for name, value in observation.items() if value is not None and name != "metadata"}
        if len(content) == 1:
            content = next(iter(content.values()))
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


@frozen(kw_only=True)
class OpenEnvAgent:
    """Plays episodes in the environments of one server. The reward is the sum of the rewards of its steps."""

    url: str
    """The server, such as http://127.0.0.1:8000. It has to allow as many sessions as episodes run at once."""
    system_prompt: str = ""
    max_steps: int = 32
    """Answers of the model after which an episode ends, with the reward until then."""
    max_tokens: int | None = None
    actions: Actions = field(default=Actions.AUTO, converter=Actions)
    timeout_seconds: float = 60.0
    """How long the server may take for a step."""

    def __attrs_post_init__(self) -> None:
        """Raise ``WorkflowError`` without the package."""
        if find_spec("openenv") is None:
            raise WorkflowError(f"Environments of OpenEnv need its client; run: {INSTALL}")

    async def run(self, data: Mapping[str, Any], **extra_kwargs: Any) -> float:
        """Play one episode, and return its reward. Raises ``EpisodeError`` if the server or the model fails."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise EpisodeError(
                "OpenEnv's client runs on asyncio, and this run is on trio; set rollout.openai.mode: subprocess."
            ) from None
        from openenv import GenericEnvClient  # pyright: ignore[reportMissingImports] - optional

        http_client: httpx.AsyncClient = extra_kwargs["http_client"]
        try:
            async with GenericEnvClient(base_url=self.url, message_timeout_s=self.timeout_seconds) as environment:
                response = await http_client.get(f"{self.url.rstrip('/')}/schema")
                if not response.is_success:
                    raise EpisodeError(f"{self.url}/schema answered {response.status_code}; is it a server of OpenEnv?")
                schema, tools = response.json()["action"], None
                if schema.get("title") in _MCP_ACTIONS:
                    tools = (await environment.step({"type": "list_tools"})).observation["tools"]
                try:
                    form = choose_form(schema, self.actions, tools)
                except ValueError as error:
                    raise EpisodeError(
                        f"The model cannot act by text at {self.url}: {error}; use actions: tools."
                    ) from error
                return await self._play(environment, dict(data), form, extra_kwargs)
        # Of the client: ConnectionError, TimeoutError and RuntimeError for what the server reports.
        except (OSError, TimeoutError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
            raise EpisodeError(f"The environment at {self.url} failed: {said}") from error

    async def _play(self, environment: Any, reset: dict[str, Any], form: Form, link: Mapping[str, Any]) -> float:
        result = await environment.reset(**reset)
        messages: list[dict[str, Any]] = []
        if self.system_prompt:
            messages.append({"role": "system", "content": self.system_prompt})
        messages.append({"role": "user", "content": describe(result.observation)})
        # The sum of the rewards of the steps, as in verifiers' taskset of the same name.
        total, num_steps, is_done = float(result.reward or 0.0), 0, bool(result.done)
        for _ in range(self.max_steps):
            if is_done:
                break
            answer = await self._ask(messages, form, link)
            messages.append(answer)
            calls = answer.get("tool_calls") or []
            if form.text_field is None and not calls:
                break  # it says something instead of acting
            for call in calls if form.text_field is None else [None]:
                said, reward, is_done = await _act(environment, answer, call, form)
                total, num_steps = total + reward, num_steps + 1
                role = {"role": "user"} if call is None else {"role": "tool", "tool_call_id": call["id"]}
                messages.append({**role, "content": said})
                if is_done:
                    break
        with suppress(InvalidRequest):  # outside of a run, nothing is logged
            workflow_context.log(environment_steps=float(num_steps), is_done=float(is_done))
        return total

    async def _ask(self, messages: list[dict[str, Any]], form: Form, link: Mapping[str, Any]) -> dict[str, Any]:
        request: dict[str, Any] = {"model": "policy", "messages": messages}
        if form.tools:
            request["tools"] = form.tools
        if self.max_tokens is not None:
            request["max_tokens"] = self.max_tokens
        response = await link["http_client"].post(
            f"{link['base_url']}/chat/completions",
            json=request,
            headers={"authorization": f"Bearer {link['api_key']}"},
        )
        if not response.is_success:
            raise EpisodeError(f"The model answered {response.status_code}: {response.text[:300]}")
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message


async def _act(
    environment: Any, answer: Mapping[str, Any], call: Mapping[str, Any] | None, form: Form
) -> tuple[str, float, bool]:
    """Carry out an action; return what the model is told, its reward, and whether the episode is over.

    An action that does not fit is told to the model, which may try again.
    """
    try:
        if call is None:
            assert form.text_field is not None
            action = {form.text_field: answer.get("content") or ""}
        else:
            action = parse_call(call, form)
        result = await environment.step(action)
    except ValueError as error:
        return f"Error: {error}", 0.0, False
    except RuntimeError as error:
        if _INVALID not in str(error):
            raise
        return f"Error: {error}", 0.0, False
    return describe(result.observation), float(result.reward or 0.0), bool(result.done)
