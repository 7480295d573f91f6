"""What a client does next: goes on, asks again, goes back, edits, forgets, sums up, changes its instructions or tools.

Pure: a move takes a conversation and returns what is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from attrs import evolve, frozen
from tools.fuzz.words import Client, Entry, Reply, Wire, echo, key_of, rename, say
from tools.fuzz.writing import words

__all__ = ["MOVES", "TOOLS", "Talk", "begin", "choose_move"]

TOOLS: tuple[Wire, ...] = tuple(
    {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}}},
    }
    for name, description in (("look", "Look something up."), ("add", ""), ("send", "Send a <|im_end|> message."))
)
SYSTEMS: tuple[tuple[str, ...], ...] = ((), ("Be brief.",), ("Be <|im_end|> kind.\n",), ("Be a", "and b"))
OPTIONS: tuple[Wire, ...] = ({}, {"enable_thinking": False}, {"thinking": True}, {"a": [1, "<|eot_id|>"]})


@frozen(kw_only=True)
class Talk:
    """A conversation of one client. ``last`` is the answer that the last entry echoes, where there is one.

    ``named`` is the answer that a client of Responses follows by its id.
    """

    client: Client
    system: tuple[str, ...] = ()
    tools: tuple[Wire, ...] = ()
    options: Mapping[str, Any] = {}
    entries: tuple[Entry, ...] = ()
    last: Reply | None = None
    named: str | None = None
    num_unsaid: int = 0
    """Entries that the server knows, because it was given a name in their place."""
    is_server_side: bool = False
    """Whether this client of Responses leaves the history to the server."""
    own: tuple[str, ...] = ()
    """The answers that this conversation was given, in order."""

    def answered(self, reply: Reply, rng: Random) -> Talk:
        """The conversation with an answer."""
        entries = (*self.entries, echo(self.client, reply, rng))
        named = reply.interaction if self.is_server_side else None
        own = (*self.own, reply.interaction)
        return evolve(self, entries=entries, last=reply, named=named, num_unsaid=len(entries) if named else 0, own=own)


def begin(client: Client, rng: Random, number: int) -> Talk:
    """A first question."""
    return _asked(
        Talk(
            client=client,
            system=rng.choice(SYSTEMS),
            tools=rng.choice((TOOLS, TOOLS[:2], TOOLS[:1], ())),
            options=rng.choice(OPTIONS) if rng.random() < 0.15 else OPTIONS[0],
            is_server_side="items" in client.styles and rng.random() < 0.5,
        ),
        rng,
        number,
    )


def _asked(talk: Talk, rng: Random, number: int) -> Talk:
    text = f"{number} {words(rng)}" if rng.random() < 0.8 else words(rng, most=2)
    new = [say("user", text)]
    if rng.random() < 0.04:
        new.insert(rng.randrange(2), say("system", "By the way: " + words(rng, most=2)))
    if rng.random() < 0.04:
        new.insert(rng.randrange(2), say("user", f"{number} A reminder."))
    return evolve(talk, entries=(*talk.entries, *new))


def go_on(talk: Talk, rng: Random, number: int) -> Talk:
    """The results of the calls, or the next question."""
    if talk.last is None or not talk.last.message.tool_calls:
        return _asked(talk, rng, number)
    talk = evolve(talk, entries=(*talk.entries, *_results(talk, talk.last, rng, number)))
    return _asked(talk, rng, number) if rng.random() < 0.1 else talk


def _results(talk: Talk, last: Reply, rng: Random, number: int) -> list[Entry]:
    has_names = not _is_renamed(talk)
    results = []
    for position, call in enumerate(last.message.tool_calls):
        text = f"{number} {words(rng, most=3)}" if rng.random() < 0.95 else ""
        wire = talk.client.result(call if has_names else evolve(call, id=rename(call.id)), text)
        results.append(Entry(wire=(wire,), keys=(("tool", position, text),)))
    if rng.random() < 0.1:
        rng.shuffle(results)
    elif rng.random() < 0.1 and results and "tool_call_id" in results[0].wire[0]:
        for entry in results:
            del entry.wire[0]["tool_call_id"]
    return results


def _is_renamed(talk: Talk) -> bool:
    calls = talk.entries[-1].wire[-1].get("tool_calls")
    return bool(calls) and calls[0]["id"].startswith("mine_")


_ARGUMENTS: tuple[Callable[[str], str], ...] = (
    lambda _: '{"edited": true}',
    lambda _: "",
    lambda _: "null",
    lambda text: text[: len(text) // 2] + '"cut',
    lambda text: f"[{text}]",
)
"""What clients make of the arguments of a call that they could not read, or changed."""


def edit_answer(talk: Talk, rng: Random, number: int) -> Talk:
    """Put other words into the model's mouth."""
    if talk.last is None:
        return go_on(talk, rng, number)
    message = talk.last.message
    if message.tool_calls and rng.random() < 0.7:
        call = evolve(message.tool_calls[0], arguments=rng.choice(_ARGUMENTS)(message.tool_calls[0].arguments))
        message = evolve(message, tool_calls=(call, *message.tool_calls[1:]))
    else:
        message = evolve(message, content=(message.content or "") + " not what was said")
    wire = tuple(talk.client.echo(talk.last, message, "edited"))
    edited = Entry(wire=wire, keys=(key_of(message),))
    return go_on(_whole(evolve(talk, entries=(*talk.entries[:-1], edited))), rng, number)


def _whole(talk: Talk) -> Talk:
    """The conversation with its whole history said by the client."""
    return evolve(talk, named=None, num_unsaid=0)


def edit_question(talk: Talk, rng: Random, number: int) -> Talk:
    """Change the first question, and keep all that followed."""
    asked = next((at for at, entry in enumerate(talk.entries) if entry.keys[0][0] == "user"), None)
    talk = _whole(talk)
    if asked is None:
        return go_on(talk, rng, number)
    entries = (*talk.entries[:asked], say("user", f"{number} edited"), *talk.entries[asked + 1 :])
    return go_on(evolve(talk, entries=entries), rng, number)


def window(talk: Talk, rng: Random, number: int) -> Talk:
    """Forget the beginning."""
    starts = [at for at, entry in enumerate(talk.entries) if entry.keys[0][0] == "user" and at]
    talk = _whole(talk)
    return go_on(evolve(talk, entries=talk.entries[rng.choice(starts) :]) if starts else talk, rng, number)


def compact(talk: Talk, rng: Random, number: int) -> Talk:
    """A summary in the place of the history."""
    summary = say("user", f"{number} So far: " + words(rng))
    return evolve(_whole(talk), entries=(summary,), last=None)


def change_system(talk: Talk, rng: Random, number: int) -> Talk:
    """Other instructions."""
    return go_on(evolve(talk, system=rng.choice((*SYSTEMS, (f"{number}",)))), rng, number)


def change_tools(talk: Talk, rng: Random, number: int) -> Talk:
    """Other tools."""
    return go_on(evolve(talk, tools=rng.choice((TOOLS, TOOLS[1:], TOOLS[:1], ()))), rng, number)


def change_options(talk: Talk, rng: Random, number: int) -> Talk:
    """Other options of the template."""
    return go_on(evolve(talk, options=rng.choice(OPTIONS)), rng, number)


def drop_answer(talk: Talk, rng: Random, number: int) -> Talk:
    """Leave the last answer out, and complain about it."""
    if talk.last is None:
        return go_on(talk, rng, number)
    complaint = say("user", f"{number} That was malformed.")
    return evolve(_whole(talk), entries=(*talk.entries[:-1], complaint), last=None)


def drop_call(talk: Talk, rng: Random, number: int) -> Talk:
    """Leave an answer out, and keep the results of its calls."""
    if talk.last is None or not talk.last.message.tool_calls:
        return go_on(talk, rng, number)
    results = _results(talk, talk.last, rng, number)
    return evolve(_whole(talk), entries=(*talk.entries[:-1], *results), last=None)


def leave_open(talk: Talk, rng: Random, number: int) -> Talk:
    """Ask before the calls have results, or after some of them."""
    if talk.last is None or not talk.last.message.tool_calls:
        return go_on(talk, rng, number)
    results = _results(talk, talk.last, rng, number)
    return _asked(evolve(talk, entries=(*talk.entries, *results[: rng.randrange(len(results))])), rng, number)


def begin_with_answer(talk: Talk, rng: Random, number: int) -> Talk:
    """Forget all that came before some answer."""
    starts = [at for at, entry in enumerate(talk.entries) if entry.keys[0][0] == "assistant"]
    talk = _whole(talk)
    return go_on(evolve(talk, entries=talk.entries[rng.choice(starts) :]) if starts else talk, rng, number)


def instruct(talk: Talk, rng: Random, number: int) -> Talk:
    """Say all as the system, and ask nothing."""
    order = say("system", f"{number} {words(rng)}")
    return evolve(_whole(talk), entries=(order,), last=None)


def flatten(talk: Talk, rng: Random, number: int) -> Talk:
    """Calls and their results as text."""
    if talk.last is None or not talk.last.message.tool_calls:
        return go_on(talk, rng, number)
    text = f"Calling tools:\n{[call.name for call in talk.last.message.tool_calls]!r}"
    spoken = Entry(wire=({"role": "assistant", "content": text},), keys=(("assistant", text, ()),))
    entries = (*talk.entries[:-1], spoken, say("user", f"Observation:\n{number}"))
    return evolve(_whole(talk), entries=entries, last=None)


def lose_ids(talk: Talk, rng: Random, number: int) -> Talk:
    """Say the whole history to a server that was named an answer until now."""
    return go_on(_whole(talk), rng, number)


def ask_again(talk: Talk, rng: Random, number: int) -> Talk:
    """The same once more, where no answer has come in between."""
    return talk if talk.last is None else go_on(talk, rng, number)


Move = Callable[[Talk, Random, int], Talk]
MOVES: Mapping[Move, int] = {
    go_on: 70,
    edit_answer: 3,
    edit_question: 2,
    window: 4,
    compact: 2,
    change_system: 3,
    change_tools: 3,
    change_options: 3,
    drop_answer: 2,
    drop_call: 2,
    leave_open: 3,
    begin_with_answer: 2,
    instruct: 1,
    flatten: 2,
    lose_ids: 2,
    ask_again: 4,
}
_MOVES: Sequence[Move] = tuple(MOVES)
_WEIGHTS = tuple(MOVES.values())


def choose_move(rng: Random) -> Move:
    """One of the moves, by their weights."""
    return rng.choices(_MOVES, _WEIGHTS)[0]
