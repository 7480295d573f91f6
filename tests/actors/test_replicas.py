"""The router: sessions stay where they are, generations survive their replica, weights and pauses hold for all."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest
from tests.actors.yard import START, CountingEngine, Yard, ids_of, open_yard, request

from areal_actors.actors.generation import GenerationActor
from areal_actors.actors.replicas import RouterConfig
from areal_actors.core import Restart
from areal_actors.domain import Chunk, EngineRequest, Exactly, FinishReason, PauseMode, Snapshot
from areal_actors.errors import (
    CaptureViolation,
    EngineError,
    InvalidRequest,
    ModelError,
    Unavailable,
)
from areal_actors.messages import (
    AddReplica,
    DescribeEngine,
    Generate,
    Generation,
    PauseGeneration,
    PublishWeights,
    ResumeGeneration,
)
from areal_actors.testing.remote import pretend_remote

pytestmark = pytest.mark.anyio

EIGHT = list(range(START + 1, START + 9))


class Reading:
    """A generation that is read in the background."""

    def __init__(self, yard: Yard, asked: EngineRequest) -> None:
        self.yard, self.asked = yard, asked
        self.chunks: list[Chunk] = []
        self.error: Exception | None = None
        self.is_over = False

    async def run(self) -> None:
        try:
            async with self.yard.router.stream(Generate(request=self.asked)) as chunks:
                async for chunk in chunks:
                    self.chunks.append(chunk)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error
        self.is_over = True

    @property
    def ids(self) -> list[int]:
        return ids_of(self.chunks)

    @property
    def versions(self) -> list[int]:
        return [chunk.version for chunk in self.chunks]


@asynccontextmanager
async def reading(yard: Yard, asked: EngineRequest):
    """One generation, begun."""
    one = Reading(yard, asked)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.run)
        await anyio.wait_all_tasks_blocked()
        yield one
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()


def whereabouts(yard: Yard) -> dict[str, int]:
    """How many generations each engine was asked for."""
    return {name: len(engine.requests) for name, engine in yard.engines.items()}


# ------------------------------------------------------------------------------------------------------ choosing


async def test_a_session_stays_at_its_replica_and_new_ones_are_spread():
    """Each routing key goes to one engine; keys are dealt out evenly."""
    async with open_yard("a", "b", "c") as yard:
        for _ in range(3):
            for key in ("x", "y", "z"):
                await yard.generate(request(key=key))
    keys = [{asked.routing_key for asked in engine.requests} for engine in yard.engines.values()]

    assert [1, 1, 1] == [len(seen) for seen in keys]
    assert {"x", "y", "z"} == set.union(*keys)
    assert {"a": 3, "b": 3, "c": 3} == whereabouts(yard)


async def test_a_new_session_goes_to_the_least_loaded():
    """By the share of places that are taken."""
    async with open_yard() as yard:
        await yard.add("busy", CountingEngine(is_gated=True))
        async with reading(yard, request()), reading(yard, request()):
            await yard.add("idle", CountingEngine(is_gated=True))
            async with reading(yard, request()), reading(yard, request()):
                assert {"busy": 2, "idle": 2} == whereabouts(yard)


async def test_requests_wait_for_the_first_replica():
    """Nobody is refused while the first one is on its way."""
    async with open_yard() as yard, reading(yard, request()) as one:
        assert not one.is_over
        await yard.add("a")
        await anyio.wait_all_tasks_blocked()

        assert EIGHT == one.ids


async def test_without_a_replica_requests_are_refused_in_time():
    """With 503 and a hint, which clients repeat; the deadline of the asker comes first if it is earlier."""
    async with open_yard(config=RouterConfig(wait_seconds=7)) as yard:
        began = anyio.current_time()
        with pytest.raises(Unavailable, match="none is known") as refusal:
            await yard.generate()
        waited = anyio.current_time() - began
        with anyio.move_on_after(3) as scope:
            await yard.generate()

    assert (7, 503, 1.0) == (pytest.approx(waited), refusal.value.status, refusal.value.retry_after_seconds)
    assert scope.cancelled_caught


# ------------------------------------------------------------------------------------------------------- failing


async def test_a_generation_survives_its_replica():
    """It goes on elsewhere with the ids that were sampled: one answer, no token lost or twice."""
    async with open_yard() as yard:
        first = await yard.add("a", CountingEngine(is_gated=True))
        async with reading(yard, request(8, key="s")) as one:
            first.release(3)
            await anyio.wait_all_tasks_blocked()
            second = await yard.add("b", CountingEngine())
            await yard.kill("a")
            await anyio.wait_all_tasks_blocked()
        rest = second.requests[0]

    assert EIGHT == one.ids
    assert FinishReason.LENGTH is one.chunks[-1].finish
    assert [1, START, START + 1, START + 2, START + 3] == rest.prompt.tolist()
    assert 5 == rest.sampling.max_new_tokens
    assert rest.id != first.requests[0].id
    assert rest.key != first.requests[0].key
    assert [chunk.finish for chunk in one.chunks[:-1]] == [None] * (len(one.chunks) - 1)


async def test_a_session_moves_once():
    """To where its generation went on; it stays there when the old replica comes back."""
    async with open_yard("a", "b") as yard:
        await yard.generate(request(key="s"))
        await yard.kill("a")
        await yard.generate(request(key="s"))
        await yard.add("a")
        await yard.generate(request(key="s"))

    assert {"a": 0, "b": 2} == whereabouts(yard)


@pytest.mark.parametrize(
    ("num_tokens", "options", "finish"),
    [(3, {}, FinishReason.LENGTH), (8, {"stop_token_ids": (START + 3,)}, FinishReason.STOP)],
)
async def test_the_end_is_told_although_its_replica_did_not_live_to_tell_it(num_tokens, options, finish):
    """When all was sampled, nobody is asked for more."""

    class Mute(CountingEngine):
        def _find_finish(self, generation, token_id):
            return None

    async with open_yard() as yard:
        engine = await yard.add("a", Mute(is_gated=True))
        async with reading(yard, request(num_tokens, **options)) as one:
            engine.release(3)
            await anyio.wait_all_tasks_blocked()
            await yard.kill("a")

    assert EIGHT[:3] == one.ids
    assert finish is one.chunks[-1].finish
    assert one.error is None


async def test_a_generation_that_fails_everywhere_fails():
    """After as many replicas as are allowed, with the last reason; each was asked once."""
    async with open_yard("a", "b", "c", "d") as yard:
        for engine in yard.engines.values():
            engine.fail(RuntimeError("no memory"))
        with pytest.raises(EngineError, match=r"failed at 3 replicas.*no memory"):
            await yard.generate()
        states = await yard.states()

    assert {"serving"} == set(states.values())


async def test_an_engine_that_fails_moves_the_generation_and_is_out_after_a_few():
    """One failure is the generation's, many in a row are the engine's; others are not disturbed."""
    async with open_yard("a", "b", config=RouterConfig(max_failures=2)) as yard:
        yard.engines["a"].fail(RuntimeError("broken"))
        answers = [ids_of(await yard.generate(request(key=str(number)))) for number in range(8)]
        views = await yard.views()

    assert [EIGHT] * 8 == answers
    assert "broken" in (views["a"].error or "")
    assert "serving" == views["b"].state


@pytest.mark.parametrize("refusal", [InvalidRequest("no", param="id"), CaptureViolation("no")])
async def test_what_is_wrong_with_the_request_is_passed_on(refusal: Exception):
    """Another replica would say the same."""

    class Refusing(CountingEngine):
        def generate(self, request):
            self.requests.append(request)
            raise refusal

    async with open_yard() as yard:
        for name in ("a", "b"):
            await yard.add(name, Refusing())
        with pytest.raises(type(refusal)):
            await yard.generate()

    assert 1 == sum(whereabouts(yard).values())


async def test_a_generation_under_a_grammar_moves_only_before_it_began():
    """An engine begins a grammar at its beginning; the client is told to ask again."""
    async with open_yard() as yard:
        first = await yard.add("a", CountingEngine(is_gated=True, has_grammars=True))
        grammar = Exactly(text="yes")
        async with reading(yard, request(grammar=grammar)) as begun:
            first.release(1)
            await anyio.wait_all_tasks_blocked()
            async with reading(yard, request(grammar=grammar)) as fresh:
                await yard.add("b", CountingEngine(has_grammars=True))
                await yard.kill("a")
                await anyio.wait_all_tasks_blocked()

    assert isinstance(begun.error, Unavailable)
    assert EIGHT == fresh.ids


async def test_leaving_aborts_at_the_replica():
    """As with one engine."""
    async with open_yard() as yard:
        engine = await yard.add("a", CountingEngine(is_gated=True))
        async with reading(yard, request()):
            engine.release(2)
        views = await yard.views()

    assert (0, 1) == (views["a"].num_running, engine.statistics().aborted)


async def test_the_deadline_of_the_asker_is_no_failure_of_the_replica():
    """Nothing is moved for it."""
    async with open_yard() as yard:
        await yard.add("a", CountingEngine(is_gated=True))
        await yard.add("b", CountingEngine(is_gated=True))
        with anyio.move_on_after(5) as scope:
            await yard.generate()
        with pytest.raises(TimeoutError), anyio.fail_after(5):
            await yard.generate()

    assert scope.cancelled_caught
    assert {"a": 1, "b": 1} == whereabouts(yard)


async def test_a_replica_that_restarts_is_told_everything_anew():
    """Its actor begins a new life behind the same ref, with the weights that it was made with."""
    async with open_yard() as yard:
        made: list[CountingEngine] = []

        def create() -> GenerationActor:
            made.append(CountingEngine(is_gated=not made))
            return GenerationActor(made[-1])

        ref = await yard.system.spawn(create, name="a", supervision=Restart())
        await yard.router.ask(AddReplica(name="a", ref=ref))
        await anyio.wait_all_tasks_blocked()
        await yard.publish(4)
        async with reading(yard, request()) as one:
            made[0].release(2)
            await anyio.wait_all_tasks_blocked()
            made[0].fail(RuntimeError("gone"))
            with pytest.raises(EngineError):
                await ref.ask(PauseGeneration())
            await ref.tell(PauseGeneration())  # what is told and fails crashes the actor
            await anyio.sleep(60)

    assert EIGHT == one.ids
    assert [4] == [snapshot.version for snapshot in made[1].loaded]


# ------------------------------------------------------------------------------------------------------- weights


async def test_all_replicas_load_what_is_published():
    """At once, and the reply comes when all have it."""
    async with open_yard("a", "b") as yard:
        replied = await yard.publish(3)
        view = await yard.router.ask(DescribeEngine())

    assert (3, 3) == (replied, view.version)
    assert [[3], [3]] == [[one.version for one in engine.loaded] for engine in yard.engines.values()]


async def test_who_joins_late_gets_the_weights_before_it_gets_requests():
    """And no token comes from those that it was made with."""
    async with open_yard("a") as yard:
        await yard.publish(1)
        await yard.publish(2)
        late = CountingEngine()
        late.gate = anyio.Event()
        await yard.add("b", late)
        await yard.kill("a")
        async with reading(yard, request()) as one:
            assert 0 == len(late.requests)
            late.gate.set()
            await anyio.sleep(5)

    assert [2] == [snapshot.version for snapshot in late.loaded]
    assert {2} == set(one.versions)


async def test_who_cannot_load_is_out_until_it_can():
    """Its generations go on elsewhere under the new weights; it comes back by itself."""
    async with open_yard() as yard:
        failing = await yard.add("a", CountingEngine(is_gated=True))
        async with reading(yard, request()) as one:
            failing.release(2)
            await anyio.wait_all_tasks_blocked()
            await yard.add("b")
            failing.refuses.add(1)
            await yard.publish(1)
            out = await yard.states()
            await anyio.wait_all_tasks_blocked()
            failing.refuses.clear()
            await anyio.sleep(60)
            back = await yard.states()

    assert {"a": "joining", "b": "serving"} == out
    assert {"a": "serving", "b": "serving"} == back
    assert EIGHT == one.ids
    assert [0, 0, *[1] * 6] == one.versions


async def test_weights_that_nobody_can_load_are_refused_and_the_old_ones_served_on():
    """As with one engine that keeps its weights."""
    async with open_yard("a", "b") as yard:
        await yard.publish(1)
        for engine in yard.engines.values():
            engine.refuses.add(2)
        with pytest.raises(EngineError, match=r"No replica could load version 2.*does not fit.*Version 1 is kept"):
            await yard.publish(2)
        chunks = await yard.generate()

    assert {1} == {chunk.version for chunk in chunks}


async def test_a_load_that_does_not_end_is_given_up():
    """The others serve the new weights meanwhile."""
    async with open_yard("a", "b", config=RouterConfig(load_seconds=30)) as yard:
        yard.engines["a"].gate = anyio.Event()
        began = anyio.current_time()
        await yard.publish(1)
        seconds = anyio.current_time() - began
        states = await yard.states()
        yard.engines["a"].gate.set()

    assert 30 == pytest.approx(seconds)
    assert {"a": "joining", "b": "serving"} == states


async def test_versions_never_go_back():
    """Answers rely on what was served; the same version may be published again."""
    async with open_yard("a", version=2) as yard:
        await yard.publish(2)
        await yard.publish(2)
        with pytest.raises(EngineError, match="Version 1 was published after version 2"):
            await yard.publish(1)
        with pytest.raises(ModelError, match="neither state nor path"):
            await yard.router.ask(PublishWeights(snapshot=Snapshot(version=3)))

    assert [2, 2] == [snapshot.version for snapshot in yard.engines["a"].loaded]


async def test_weights_in_memory_are_lent_for_the_publication_only():
    """Who comes later would read what the trainer has changed since: it waits for the next ones."""
    async with open_yard("a") as yard:
        await yard.publish(1, is_lent=True)
        late = await yard.add("b", CountingEngine())
        fitting = await yard.add("c", CountingEngine(version=1))
        before = await yard.views()
        await yard.publish(2, is_lent=True)
        after = await yard.states()

    assert ["serving", "joining", "serving"] == [str(view.state) for view in before.values()]
    assert "waits for the next publication" in (before["b"].error or "")
    assert {"a": "serving", "b": "serving", "c": "serving"} == after
    assert [2] == [snapshot.version for snapshot in late.loaded]
    assert [2] == [snapshot.version for snapshot in fitting.loaded]


async def test_a_publication_without_replicas_is_for_those_that_come():
    """The trainer does not wait for them."""
    async with open_yard() as yard:
        assert 5 == await yard.publish(5)
        engine = await yard.add("a")

    assert [5] == [snapshot.version for snapshot in engine.loaded]


async def test_a_replica_with_older_weights_than_the_run_waits_for_the_first_publication():
    """A resumed run begins at its own version, whatever the replica was made with."""
    async with open_yard(version=7) as yard:
        await yard.add("a")
        states = await yard.states()
        await yard.publish(7)
        await anyio.wait_all_tasks_blocked()

        assert {"a": "joining"} == states
        assert {"a": "serving"} == await yard.states()


async def test_a_replica_of_another_model_is_kept_out():
    """Its ids would be others."""
    async with open_yard("a") as yard:
        await yard.add("b", CountingEngine(vocab_size=17))
        views = await yard.views()

    assert "vocabulary" in (views["b"].error or "")
    assert "joining" == views["b"].state


# -------------------------------------------------------------------------------------------------------- pauses


async def test_a_pause_holds_for_all_and_for_those_that_join():
    """Nothing is sampled until the end of the pause, wherever it would be."""
    async with open_yard("a") as yard:
        await yard.router.ask(PauseGeneration())
        await yard.add("b")
        async with reading(yard, request()) as first, reading(yard, request()) as second:
            await yard.kill("a")
            await anyio.sleep(5)
            assert [] == first.ids == second.ids
            await yard.router.ask(ResumeGeneration())
            await anyio.wait_all_tasks_blocked()

    assert EIGHT == first.ids == second.ids


async def test_who_was_paused_while_it_was_away_goes_on_when_it_joins():
    """What another life of the router had said does not hold any more."""
    engine = CountingEngine()
    await engine.pause(PauseMode.KEEP)
    async with open_yard() as yard:
        await yard.add("a", engine)

        assert EIGHT == ids_of(await yard.generate())


# ------------------------------------------------------------------------------------------------------ replicas


async def test_what_runs_at_a_replica_that_is_removed_goes_on_elsewhere():
    """The reply comes when nothing runs there; unknown names are fine."""
    async with open_yard() as yard:
        first = await yard.add("a", CountingEngine(is_gated=True))
        async with reading(yard, request()) as one:
            first.release(3)
            await anyio.wait_all_tasks_blocked()
            await yard.add("b")
            await yard.remove("a")
            await yard.remove("nobody")
            await anyio.wait_all_tasks_blocked()

            assert {"b": "serving"} == await yard.states()
    assert EIGHT == one.ids
    assert 1 == first.statistics().aborted


async def test_a_namesake_takes_the_place():
    """The old one's end is no news of the new one."""
    async with open_yard("a") as yard:
        former = yard.refs["a"]
        await yard.add("a")
        await former.stop(grace=0)
        await anyio.wait_all_tasks_blocked()

        assert {"a": "serving"} == await yard.states()
        assert EIGHT == ids_of(await yard.generate())


async def test_counters_are_sums_that_never_fall():
    """Dead replicas have sampled what they sampled; those that come back begin at zero."""
    async with open_yard("a", "b") as yard:
        for number in range(4):
            await yard.generate(request(key=str(number)))
        before = await yard.router.ask(DescribeEngine())
        await yard.kill("a")
        without = await yard.router.ask(DescribeEngine())
        await yard.add("a")
        for number in range(4):
            await yard.generate(request(key=f"again {number}"))
        after = await yard.router.ask(DescribeEngine())

    assert [32, 32, 64] == [view.statistics.sampled_tokens for view in (before, without, after)]
    assert [2048, 1024, 2048] == [view.info.max_concurrent for view in (before, without, after)]


async def test_who_asks_for_facts_waits_for_the_first_replica():
    """Sessions ask for them before anything else."""
    async with open_yard(config=RouterConfig(wait_seconds=9)) as yard:
        with pytest.raises(Unavailable):
            await yard.router.ask(DescribeEngine())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(yard.add, "a")
            view = await yard.router.ask(DescribeEngine())

    assert "echo" == view.info.name


async def test_a_replica_elsewhere_is_as_good():
    """Behind a connection: generations, weights and pauses pass, and its loss is noticed."""
    async with open_yard() as yard:
        engine = CountingEngine(is_gated=True)
        far = await yard.system.spawn(GenerationActor(engine), name="far")
        async with pretend_remote({"generation": far}) as (peer, _):
            await yard.router.ask(AddReplica(name="a", ref=peer.ref(Generation, "generation")))
            await yard.publish(1)
            async with reading(yard, request()) as one:
                engine.release(3)
                await anyio.wait_all_tasks_blocked()
                peer.close()
                await anyio.wait_all_tasks_blocked()
                assert {"a": "gone"} == await yard.states()
                await yard.add("b")
                await anyio.wait_all_tasks_blocked()

    assert EIGHT == one.ids
    assert {1} == set(one.versions)


async def test_the_router_leaves_its_replicas_alone_when_it_ends():
    """They belong to whoever started them, and are watched no longer."""
    async with open_yard("a") as yard:
        await yard.router.stop()
        view = await yard.refs["a"].ask(DescribeEngine())
        await yard.kill("a")

    assert 0 == view.version
