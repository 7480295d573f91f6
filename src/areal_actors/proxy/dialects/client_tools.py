"""Tools that are not functions: how the model sees them as functions, and how their calls are written for the client.

The model knows functions only. A freeform tool (``custom``) becomes a function with one text, ``input``. A typed tool
that the client runs (``bash_20250124``, ``shell``, ``apply_patch``) becomes the function that its vendor documents:
each is a row here. A call whose arguments do not fit the tool is written as a call of a function, which clients answer
with an error that the model can read.

Tools that the vendor's servers would run cannot be offered. ``without_server_tools`` decides by the request alone
whether it can be answered without them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson
from attrs import field, frozen

from areal_actors.domain import Tool, ToolCall
from areal_actors.errors import UnsupportedParameter
from areal_actors.lib.exact_json import dump_json, load_json, replace_surrogates
from areal_actors.proxy.dialects.fields import (
    JsonObject,
    Schema,
    optional_text,
    required_text,
    shown,
    without_nulls,
    wrong,
)

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer"}
_COUNTS: Schema = {"type": "array", "items": _COUNT}
_TEXTS: Schema = {"type": "array", "items": _TEXT}


def _text(description: str) -> Schema:
    return {"type": "string", "description": description}


def _function(properties: Mapping[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def _words(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


# ------------------------------------------------------------------------------------------------ tools with a type


@frozen(kw_only=True)
class TypedTool:
    """A tool that its type describes and the client runs, as a function for the model.

    ``item`` is the type of a call in OpenAI's Responses. Its ``key`` holds the arguments. ``defaults`` are arguments
    that the client expects and the model may leave out. Anthropic's calls need none of them: they are written as those
    of functions.
    """

    name: str
    description: str
    parameters: Schema
    item: str = ""
    key: str = ""
    defaults: JsonObject = field(factory=dict)

    def create_function(self, raw: JsonObject, where: str) -> Tool:
        """Return the function for the model, under the name that the client may choose.

        Raises:
            InvalidRequest: the name is no text.
        """
        name = optional_text(raw, "name", where) or self.name
        return Tool(name=name, description=self.description, parameters=self.parameters)

    def format_call(self, arguments: str) -> JsonObject | None:
        """Return the fields of a call, or ``None`` for arguments that do not fit the tool."""
        try:
            value = load_json(arguments.encode())
        except orjson.JSONDecodeError:
            return None
        if not _fits(value, self.parameters):
            return None
        value = {**self.defaults, **value}
        return {self.key: value}

    def read_call(self, raw: JsonObject, call_id: str, where: str) -> ToolCall:
        """Return the call that an item of this type holds. Raises ``InvalidRequest``."""
        value = raw.get(self.key)
        if not isinstance(value, dict):
            raise wrong(f"{where}.{self.key}", "an object", value)
        # What the client's types add to the call that it was sent, the model has not written.
        written = {name: each for name, each in without_nulls(value).items() if self.defaults.get(name) != each}
        return ToolCall(id=call_id, name=self.name, arguments=dump_json(written).decode())


NEEDED: Mapping[str, tuple[str, ...]] = {
    "create_file": ("diff",),
    "update_file": ("diff",),
}
"""Properties that an object needs because of its ``type``. Clients read them without a check."""


def _fits(value: Any, schema: Schema) -> bool:
    """Return whether ``value`` has the form of one of this module's schemas."""
    match schema["type"]:
        case "object":
            known = schema.get("properties", {})
            if not isinstance(value, dict):
                return False
            kind = value.get("type")
            required = (*schema.get("required", ()), *(NEEDED.get(kind, ()) if isinstance(kind, str) else ()))
            return (
                all(value.get(name) is not None for name in required)
                and (schema.get("additionalProperties", True) is not False or known.keys() >= value.keys())
                and all(each is None or name not in known or _fits(each, known[name]) for name, each in value.items())
            )
        case "array":
            return isinstance(value, list) and all(_fits(each, schema["items"]) for each in value)
        case "string":
            return isinstance(value, str) and value in schema.get("enum", (value,))
        case "boolean":
            return isinstance(value, bool)
        case _:
            return isinstance(value, int) and not isinstance(value, bool)


_EDITS: Mapping[str, Schema] = {
    "path": _text("the path of the file or the directory"),
    "file_text": _text("for create: the content of the file"),
    "old_str": _text("for str_replace: the text to replace, which must occur exactly once"),
    "new_str": _text("for str_replace: the text in its place"),
    "insert_line": {**_COUNT, "description": "for insert: the line after which to insert; 0 is the start"},
    "insert_text": _text("for insert: the text to insert"),
    "view_range": {**_COUNTS, "description": "for view: the first and the last line; -1 is the end"},
}
_COMMANDS = ("view", "create", "str_replace", "insert")


def _create_editor(name: str, *commands: str) -> TypedTool:
    """Return an editor of an earlier date, which inserts ``new_str`` and has further ``commands``."""
    edits = {**_EDITS, "new_str": _text("for str_replace: the text in its place; for insert: the text to insert")}
    del edits["insert_text"]
    properties = {"command": _words(*_COMMANDS, *commands), **edits}
    return TypedTool(name=name, description=_EDITOR, parameters=_function(properties, "command", "path"))


_EDITOR = "View, create and edit files."
_EDITOR_WITH_UNDO = _create_editor("str_replace_editor", "undo_edit")
ANTHROPIC_TOOLS: Mapping[str, TypedTool] = {
    "bash": TypedTool(
        name="bash",
        description="Run commands in a bash shell that keeps its state between calls.",
        parameters=_function(
            {
                "command": _text("the command to run; required unless the shell is restarted"),
                "restart": {"type": "boolean", "description": "true restarts the shell"},
            }
        ),
    ),
    "text_editor": TypedTool(
        name="str_replace_based_edit_tool",
        description=_EDITOR,
        parameters=_function({"command": _words(*_COMMANDS), **_EDITS}, "command", "path"),
    ),
    "text_editor_20241022": _EDITOR_WITH_UNDO,
    "text_editor_20250124": _EDITOR_WITH_UNDO,
    "text_editor_20250429": _create_editor("str_replace_based_edit_tool"),
    "memory": TypedTool(
        name="memory",
        description="Read and write files below /memories, which last longer than the conversation.",
        parameters=_function(
            {
                "command": _words(*_COMMANDS, "delete", "rename"),
                **_EDITS,
                "old_path": _text("for rename: the present path"),
                "new_path": _text("for rename: the new path"),
            },
            "command",
        ),
    ),
}
"""By type, or by the type without its date: ``bash_20250124`` is ``bash``."""

OPENAI_TOOLS: Mapping[str, TypedTool] = {
    "local_shell": TypedTool(
        name="local_shell",
        description="Run a command on the user's machine.",
        parameters=_function(
            {
                "command": {**_TEXTS, "description": "the program and its arguments"},
                "env": {"type": "object", "additionalProperties": _TEXT, "description": "environment variables"},
                "timeout_ms": _COUNT,
                "user": _text("the user who runs it"),
                "working_directory": _TEXT,
            },
            "command",
        ),
        item="local_shell_call",
        key="action",
        defaults={"type": "exec", "env": {}},
    ),
    "shell": TypedTool(
        name="shell",
        description="Run shell commands on the user's machine, at once.",
        parameters=_function(
            {
                "commands": _TEXTS,
                "timeout_ms": _COUNT,
                "max_output_length": {**_COUNT, "description": "characters of the output to return"},
            },
            "commands",
        ),
        item="shell_call",
        key="action",
    ),
    "apply_patch": TypedTool(
        name="apply_patch",
        description="Create, update or delete a file.",
        parameters=_function(
            {
                "type": _words("create_file", "update_file", "delete_file"),
                "path": _TEXT,
                "diff": _text(
                    "the change in the V4A format: lines that begin with '+', '-' or a blank, after '@@' and a line "
                    "that tells the place; a new file has lines with '+' only"
                ),
            },
            *("type", "path"),
        ),
        item="apply_patch_call",
        key="operation",
    ),
}
"""By type."""
CALL_ITEMS = {tool.item: tool for tool in OPENAI_TOOLS.values()}
"""By the type of an item with a call; those of results end in ``_output``."""

_DATED = re.compile(r"(\w+?)_\d{8}")
_SERVER_TOOLS = re.compile(
    r"(advisor|code_execution|code_interpreter|file_search|image_generation|mcp|mcp_toolset|programmatic_tool_calling|"
    r"tool_search(_tool_(bm25|regex))?|web_fetch|web_search|web_search_preview)(_\d{4}_?\d{2}_?\d{2})?"
)


def find_typed_tool(tools: Mapping[str, TypedTool], raw: JsonObject) -> TypedTool | None:
    """Return the row of a tool that the client runs, or ``None`` if its type has none."""
    kind = raw.get("type")
    if not isinstance(kind, str) or _is_hosted(raw):
        return None
    dated = _DATED.fullmatch(kind)
    return tools.get(kind) or (None if dated is None else tools.get(dated[1]))


def _is_hosted(raw: JsonObject) -> bool:
    # A shell runs in a container of OpenAI's unless its environment is the client's.
    environment = raw.get("environment")
    return raw.get("type") == "shell" and isinstance(environment, dict) and environment.get("type") != "local"


def _is_server_tool(raw: Any) -> bool:
    kind = raw.get("type") if isinstance(raw, dict) else None
    return isinstance(kind, str) and (_SERVER_TOOLS.fullmatch(kind) is not None or _is_hosted(raw))


def with_additional_tools(body: JsonObject) -> JsonObject:
    """Return ``body`` with the tools that items of its input offer among its ``tools``.

    Codex offers all tools so under the newest names of OpenAI's models. Of two tools of one name, the later one counts.
    """
    items = body.get("input")
    if not isinstance(items, list) or not (places := [place for place, raw in enumerate(items) if is_offer(raw)]):
        return body
    named = body.get("tools")
    offered = [*named] if isinstance(named, list) else []
    offered += [tool for place in places for tool in items[place]["tools"]]
    latest = {
        (tool.get("type"), tool.get("name")) if isinstance(tool, dict) else index: tool
        for index, tool in enumerate(offered)
    }
    replaced = [{**raw, "tools": []} if place in places else raw for place, raw in enumerate(items)]
    return {**body, "input": replaced, "tools": [*latest.values()]}


def is_offer(raw: Any) -> bool:
    """Return whether an item of the input offers tools."""
    return isinstance(raw, dict) and raw.get("type") == "additional_tools" and isinstance(raw.get("tools"), list)


def without_server_tools(body: JsonObject) -> tuple[JsonObject, tuple[str, ...]]:
    """Return ``body`` without the tools that the vendor's servers would run, and the types of those left out.

    They are left out if tools that the client runs remain: agents offer all that a vendor has, and the model does its
    work with the rest. A request for server tools alone, or one whose tool choice names one, cannot be answered as it
    was meant, and is left to be refused by name.
    """
    tools = body.get("tools")
    if not isinstance(tools, list):
        return body, ()
    kept = [raw for raw in tools if not _is_server_tool(raw)]
    if len(kept) == len(tools) or not kept:
        return body, ()
    left_out = (str(raw["type"]) for raw in tools if _is_server_tool(raw))
    return {**body, "tools": kept}, tuple(dict.fromkeys(left_out))


def refuse_tool(raw: JsonObject, where: str, known: str) -> UnsupportedParameter:
    """Return the error for a tool that cannot be offered; ``known`` says which ones can."""
    kind = shown(raw.get("type"))
    if _is_server_tool(raw):
        return UnsupportedParameter(
            f"{where} is of type {kind}, which the vendor's servers would run; offer tools that your client runs.",
            param=where,
        )
    return UnsupportedParameter(f"{where} is of type {kind}; only {known} are known.", param=where)


# ---------------------------------------------------------------------------------------------------- freeform tools

_INPUT = _function({"input": _text("the whole input of the tool, as plain text")}, "input")
_SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}


def parse_custom_tool(raw: JsonObject, where: str) -> Tool:
    """Return a freeform tool as a function with one text. Its format is described to the model, and not enforced.

    Raises:
        InvalidRequest: an invalid value; the error names it.
    """
    name, description = required_text(raw, "name", where), optional_text(raw, "description", where) or ""
    form = raw.get("format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in ("text", "grammar"):
        raise wrong(f"{where}.format", "of type text or grammar", form)
    if kind == "grammar":
        # Chat completions have an object for it.
        grammar: Any = form.get("grammar", form)
        syntax = grammar.get("syntax") if isinstance(grammar, dict) else None
        if not isinstance(syntax, str) or syntax not in _SYNTAXES or not isinstance(grammar.get("definition"), str):
            raise wrong(f"{where}.format", "a grammar with syntax lark or regex, and definition", grammar)
        described = f"The input must match this {_SYNTAXES[syntax]}:\n{grammar['definition']}"
        description = f"{description}\n\n{described}" if description else described
    return Tool(name=name, description=description, parameters=_INPUT)


def format_freeform(text: str) -> str:
    """Return the arguments of a call of a freeform tool with this input."""
    return dump_json({"input": text}).decode()


# The input ends at a quote that nothing follows but the end of the object.
_FREEFORM = re.compile(r'\s*\{\s*"input"\s*:\s*"((?:\\.|[^\\])*?(?:\\\Z)?)(?:"\s*(?:\}\s*)?)?', re.DOTALL)
_ESCAPE = re.compile(r"\\u[dD][89abAB]\w\w\\u[dD]\w{3}|\\u\w{4}|\\.", re.DOTALL)


def read_freeform(arguments: str) -> str | None:
    """Return the input of a call of a freeform tool, or ``None`` for arguments of another form.

    Nothing that the model wrote is lost: a quote that is not the last one belongs to the text, and so does an escape
    that JSON does not know. The text of arguments that break off ends there.
    """
    found = _FREEFORM.fullmatch(arguments)
    return None if found is None else _ESCAPE.sub(_unescape, found[1])


def _unescape(escape: re.Match[str]) -> str:
    try:
        return replace_surrogates(json.loads(f'"{escape[0]}"'))
    except ValueError:
        return escape[0]


# ------------------------------------------------------------------------------------------------------ what is offered


@frozen(kw_only=True)
class CallForm:
    """How the calls of one tool are written for the client: as those of a function, unless it says otherwise."""

    name: str
    namespace: str | None = None
    is_freeform: bool = False
    typed: TypedTool | None = None


@frozen(kw_only=True)
class Offer:
    """The functions that are offered to the model, and how their calls are written if not as those of functions.

    ``forms`` has the names that the model knows.
    """

    tools: tuple[Tool, ...] = ()
    forms: Mapping[str, CallForm] = field(factory=dict)
