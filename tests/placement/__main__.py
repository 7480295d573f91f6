"""Kill every process of a run in turn, and home itself: ``nox -s placement``.

Each play trains the tiny job, one with all roles at home first. Whatever is killed, the run ends well, has every step
once, and has learnt from the same samples.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.placement.play import ROLES, Outcome, Play, marked, perform, running, wait_until, workers_of

SECONDS = 900.0
GANG = ("trainer.gang={num_processes: 2, backend: gloo}", "trainer.max_packed_tokens=128")
"""Two processes that train together, with passes enough for both."""


def main() -> int:
    """Perform all; returns how many went wrong."""
    reference = performed("all at home", Play(roles=(), steps=5))
    plays = {
        "each role in a process": Play(roles=ROLES, steps=5),
        "two engines and two proxies": Play(
            roles=ROLES,
            steps=5,
            kills=[(1, "generation-1"), (2, "proxy-1")],
            example="local_processes.yaml",
        ),
        "trainer and sessions apart": Play(roles=("trainer", "sessions"), steps=5, kills=[(2, "trainer-0")]),
        **{f"{role} is killed": Play(roles=ROLES, steps=5, kills=[(2, f"{role}-0")]) for role in ROLES},
        "all are killed": Play(roles=ROLES, steps=7, kills=[(n + 1, f"{role}-0") for n, role in enumerate(ROLES)]),
    }
    num_wrong = sum(not is_right(name, play, reference) for name, play in plays.items())
    reference = performed("a gang at home", Play(roles=(), steps=4, settings=GANG))
    play = Play(roles=("trainer",), steps=4, settings=GANG, kills=[(2, "trainer-0/rank")])
    num_wrong += not is_right("a rank is killed", play, reference)
    num_wrong += not is_clean_after_home()
    print(f"{num_wrong} of {len(plays) + 2} plays went wrong", flush=True)
    return min(num_wrong, 1)


def performed(name: str, play: Play) -> Outcome:
    """Perform a play in a directory of its own."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="areal-play-") as directory:
        outcome = perform(play, Path(directory), timeout=SECONDS)
    print(f"{name}: {outcome.attempts} attempts, {time.monotonic() - started:.0f} s", flush=True)
    return outcome


def is_right(name: str, play: Play, reference: Outcome) -> bool:
    """Whether it ended as it would have without a kill."""
    try:
        outcome = performed(name, play)
        assert 0 == outcome.code, outcome.output[-4000:]
        assert [*range(1, play.steps + 1)] == [record["step"] for record in outcome.compared]
        num = min(play.steps, len(reference.compared))
        assert reference.compared[:num] == outcome.compared[:num], outcome.compared
        assert [] == marked(play.mark)
    except AssertionError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return False
    return True


def is_clean_after_home() -> bool:
    """Home is killed in the middle: nothing of the run is left a moment later."""
    play = Play(roles=ROLES, steps=50)
    with tempfile.TemporaryDirectory(prefix="areal-play-") as directory:
        with running(play, Path(directory)) as (process, path):
            deadline = time.monotonic() + SECONDS
            wait_until(lambda: len(workers_of(path)) == len(ROLES), process, deadline)
            process.send_signal(signal.SIGKILL)
            process.wait()
        time.sleep(2)
        left = marked(play.mark)
    print(f"home is killed: {len(left)} processes are left", flush=True)
    return not left


if __name__ == "__main__":
    sys.exit(main())
