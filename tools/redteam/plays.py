"""Plays of an attacker against a service: an attack succeeds if it changes what the runner has said."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

from tools.redteam.attacks import Arena, Attacker, State, open_arena, open_durable_arena

from areal_actors.messages import LeaseGroups

__all__ = ["attack_arena", "end_arena", "play", "play_restarts"]

_BLOCK = 100
"""Attacks between two looks at the sessions."""


async def play(seed: int, count: int) -> tuple[Counter[int], list[str]]:
    """Statuses of ``count`` attacks, and those that succeeded.

    An attack succeeds if it is answered with 200, if a reward or an end changed, or if the runner's own reward does not
    stand in the end. A replayed request may be answered: its session has ended, and another end changes nothing.
    """
    async with open_arena() as arena:
        attacker = Attacker(Random(seed), arena.victims, captured=arena.captured)
        statuses, successes = await attack_arena(arena, attacker, range(count), await arena.state())
        successes += await end_arena(arena)
    return statuses, successes


async def play_restarts(seed: int, count: int, directory: Path, *, num_restarts: int) -> tuple[Counter[int], list[str]]:
    """As ``play``, against a service that restarts meanwhile, each time from its journal.

    An attack also succeeds if a restart changes a reward or an end, and if the trainer gets another reward than the
    runner's for a session. Half of the attacks are replays: a restart may forget whose keys are of no use any more.
    """
    statuses: Counter[int] = Counter()
    successes: list[str] = []
    arena, attacker, before = None, None, None
    for restart in range(num_restarts + 1):
        async with open_durable_arena(directory, arena) as (arena, inference):
            attacker = attacker or Attacker(Random(seed), arena.victims, captured=arena.captured, share_of_replays=0.5)
            before = before or await arena.state()
            if (now := await arena.state()) != before:
                successes.append(f"restart {restart}: {before} became {now}")
                before = now
            span = range(count * restart // (num_restarts + 1), count * (restart + 1) // (num_restarts + 1))
            found, new = await attack_arena(arena, attacker, span, before)
            statuses += found
            successes += new
            if restart == num_restarts:
                successes += await end_arena(arena)
                ended = sum(reward or 0.0 for reward in before[2][2])
                expected = dict(zip([victim.id for victim in arena.victims[:3]], (0.5, 0.5, ended), strict=True))
                lease = await inference.exports.ask(LeaseGroups(num_groups=3, version=0, max_staleness=1))
                trained = {episode.session: episode.reward for group in lease.groups for episode in group.episodes}
                if trained != expected:
                    successes.append(f"the trainer got {trained} instead of {expected}")
    return statuses, successes


async def attack_arena(arena: Arena, attacker: Attacker, span: range, before: State) -> tuple[Counter[int], list[str]]:
    """Send attacks, numbered as in ``span``. ``before`` is what may not change."""
    statuses: Counter[int] = Counter()
    successes: list[str] = []
    for number in span:
        attack = attacker.attack()
        answer = await arena.send(attack)
        statuses[answer.status_code] += 1
        # ``GET /v1/v1/keys/..`` is the start page, which is public; no route that rewards or ends answers a page.
        is_page = attack.method == "GET" and answer.headers.get("content-type", "").startswith("text/html")
        # ``OPTIONS`` tells the methods of a route, and does nothing.
        is_harmless = is_page or attack.method == "OPTIONS"
        if answer.is_success and not attack.is_replay and not is_harmless:
            successes.append(f"{number}: {attack} was answered {answer.status_code} {answer.text[:200]}")
        is_last = number == span[-1]
        if (is_last or number % _BLOCK == _BLOCK - 1) and (now := await arena.state()) != before:
            successes.append(f"{number - number % _BLOCK} to {number}: {before} became {now}")
            before = now
    return statuses, successes


async def end_arena(arena: Arena) -> list[str]:
    """End the sessions that live as their runner does, and return what does not stand."""
    successes = []
    for session in (arena.own, arena.other):
        honest = await arena.complete(session["completion_key"])
        rewards = await arena.finalize(session, 0.5)
        if not honest.is_success or [reward for reward in rewards if reward is not None] != [0.5]:
            successes.append(f"in the end, {session['session_id']} has the rewards {rewards}, {honest.status_code}")
    return successes
