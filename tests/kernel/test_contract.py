"""Actors and protocols: what is wrong is said when the class is made, or when it is spawned."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from attrs import frozen

from areal_actors.errors import ProtocolError
from areal_actors.kernel import Actor, ActorSystem, Message, StreamMessage
from areal_actors.kernel.message import check_complete, messages_of, protocol_of, protocols_of, reply_of


class Shop:
    """Address of a shop."""


class Bank:
    """Address of a bank."""


@frozen(kw_only=True)
class Buy(Message[Shop, "Receipt"]):
    item: str = "tea"


@frozen(kw_only=True)
class Receipt:
    price: int


@frozen(kw_only=True)
class Browse(StreamMessage[Shop, str]):
    pass


@frozen(kw_only=True)
class Pay(Message[Bank, None]):
    pass


class Keeper(Actor[Shop]):
    @Buy.handler
    async def buy(self, message: Buy) -> Receipt:
        return Receipt(price=len(message.item))

    @Browse.handler(concurrency=3)
    async def browse(self, message: Browse) -> AsyncIterator[str]:
        yield "tea"


def test_message_registers_once_with_its_protocol():
    """For slots a class is made twice; only the final one counts."""
    assert (Buy, Browse) == messages_of(Shop)
    assert Shop is protocol_of(Buy)
    assert Receipt is reply_of(Buy)
    assert str is reply_of(Browse)


def test_handlers_are_collected_with_their_concurrency():
    """The table says how each message is run."""
    assert {Buy: (1, False), Browse: (3, True)} == {
        message: (handler.concurrency, handler.is_stream) for message, handler in Keeper.handlers.items()
    }


def test_handler_is_overridden_by_name_in_a_subclass():
    """An override needs no decorator, and is the one that runs."""

    class Discounter(Keeper):
        async def buy(self, message: Buy) -> Receipt:
            return Receipt(price=1)

    assert Discounter.handlers[Buy].function is Discounter.buy
    assert (Shop,) == protocols_of(Discounter)


def test_handlers_of_one_message_are_refused_if_there_are_two():
    """Both methods are named."""
    with pytest.raises(ProtocolError, match=r"handles Buy twice, in buy\(\) and sell\(\)"):

        class Confused(Keeper):
            @Buy.handler
            async def sell(self, message: Buy) -> Receipt:
                raise NotImplementedError


def test_handler_of_another_protocol_is_refused():
    """The protocols that are spoken are named."""
    with pytest.raises(ProtocolError, match="speaks Shop, but handles Pay of Bank"):

        class Greedy(Keeper):
            @Pay.handler
            async def pay(self, message: Pay) -> None: ...


def test_actor_speaks_several_protocols():
    """A union of protocols is their sum."""

    class Mall(Actor[Shop | Bank]):
        buy = Keeper.buy
        browse = Keeper.browse

        @Pay.handler
        async def pay(self, message: Pay) -> None: ...

    check_complete(Mall, Mall.handlers)

    assert (Shop, Bank) == protocols_of(Mall)


@pytest.mark.anyio
async def test_spawn_refuses_an_actor_with_a_missing_handler():
    """Not before: messages may be defined after the actor's class."""

    class Lazy(Actor[Shop]):
        buy = Keeper.buy

    async with ActorSystem.open() as system:
        with pytest.raises(ProtocolError, match=r"Lazy has no handler for Browse; add a method under @Browse\.handler"):
            await system.spawn(Lazy())


def test_handler_of_the_wrong_kind_of_function_is_refused():
    """A message needs a coroutine function, a stream message an async generator."""

    def plain(self: object, message: object) -> None: ...

    async def generator(self: object, message: object) -> AsyncIterator[str]:
        yield ""

    async def coroutine(self: object, message: object) -> None: ...

    with pytest.raises(ProtocolError, match="must be a plain 'async def'"):
        Buy.handler(plain)
    with pytest.raises(ProtocolError, match="must be a plain 'async def'"):
        Buy.handler(generator)
    with pytest.raises(ProtocolError, match="must 'yield'"):
        Browse.handler(coroutine)
    with pytest.raises(ProtocolError, match="concurrency=0"):
        Buy.handler(concurrency=0)(coroutine)


def test_message_must_be_an_attrs_class_of_a_protocol():
    """Anything else could not be checked or sent."""

    class Bare(Message[Shop, None]):
        pass

    async def handle(self: object, message: object) -> None: ...

    with pytest.raises(ProtocolError, match="Bare cannot have handlers"):
        Bare.handler(handle)
    with pytest.raises(ProtocolError, match="Message cannot have handlers"):
        Message.handler(handle)


@pytest.mark.anyio
async def test_message_without_handler_is_refused_at_the_sender():
    """Untyped callers meet the contract too."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Keeper())
        with pytest.raises(ProtocolError, match="'keeper' does not take Pay this way; it handles Browse, Buy"):
            await ref.ask(Pay())
        with pytest.raises(ProtocolError, match="does not take Pay"):
            await ref.tell(Pay())
        with pytest.raises(ProtocolError, match="does not take Browse this way"):
            await ref.tell(Browse())
        with pytest.raises(ProtocolError, match="does not take Buy this way"):
            async with ref.stream(Buy()):
                pass


@pytest.mark.anyio
async def test_lifespan_must_be_a_context_manager():
    """Forgetting the decorator is named."""

    class Undecorated(Actor[Bank]):
        async def lifespan(self, context):
            yield

        @Pay.handler
        async def pay(self, message: Pay) -> None: ...

    async with ActorSystem.open() as system:
        with pytest.raises(ProtocolError, match=r"Undecorated\.lifespan must be decorated"):
            await system.spawn(Undecorated())
