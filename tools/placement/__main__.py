"""Kill every process of a run in turn, stop it (SIGSTOP), and kill the controller: ``nox -s placement``.

Each play trains the tiny job, one with all roles in the controller first. Whatever is killed, the run ends well, has
every step once, and has learnt from the same samples. The table at the end has the seconds from each fault to the end
of the next step.
"""

from __future__ import annotations

import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

from tools.placement.play import ROLES, Outcome, Play, marked, perform, running, wait_until, workers_of

SECONDS = 900.0
FLOAT32 = ("engine.dtype=float32", "trainer.dtype=float32")
FAULTS = {signal.SIGKILL: "kill -9", signal.SIGSTOP: "SIGSTOP"}
GANG = (
    *FLOAT32,
    "trainer.gang={num_processes: 2, backend: gloo}",
    "trainer.max_packed_tokens=128",
)
"""Two processes that train together, with passes enough for both."""


def main() -> int:
    """Perform all; returns how many went wrong."""
    reference = performed("all in the controller", Play(roles=(), steps=5, settings=FLOAT32))
    plays = {
        "each role in a process": Play(roles=ROLES, steps=5, settings=FLOAT32),
        "two engines and two proxies": Play(
            roles=ROLES,
            steps=5,
            kills=[(1, "generation-1"), (2, "proxy-1")],
            example="local_processes.yaml",
            settings=FLOAT32,
        ),
        "trainer and sessions apart": Play(
            roles=("trainer", "sessions"), steps=5, kills=[(2, "trainer-0")], settings=FLOAT32
        ),
        "all are killed": Play(
            roles=ROLES, steps=7, kills=[(n + 1, f"{role}-0") for n, role in enumerate(ROLES)], settings=FLOAT32
        ),
    }
    num_wrong = sum(not is_right(name, play, reference)[0] for name, play in plays.items())
    num_wrong += num_wrong_faults(reference)
    num_wrong += num_wrong_hangs(reference)
    num_wrong += not is_clean_after_home()
    print(f"{num_wrong} plays went wrong", flush=True)
    return min(num_wrong, 1)


def num_wrong_faults(reference: Outcome) -> int:
    """Play each fault at each role, and print the table; returns how many went wrong."""
    gang = performed("a gang in the controller", Play(roles=(), steps=4, settings=GANG))
    seconds: dict[tuple[str, signal.Signals], str] = {}
    num_wrong = 0
    for role in (*ROLES, "rank"):
        for number, fault in FAULTS.items():
            if role == "rank":
                kills, expected = [(2, "trainer-0/rank")], gang
                play = Play(roles=("trainer",), steps=4, settings=GANG, kills=kills, signal=number)
            else:
                kills, expected = [(2, f"{role}-0")], reference
                play = Play(roles=ROLES, steps=4, settings=FLOAT32, kills=kills, signal=number)
            is_fine, recoveries = is_right(f"{role}: {fault}", play, expected)
            num_wrong += not is_fine
            seconds[role, number] = f"{recoveries[0]:.0f} s" if is_fine else "wrong"
    print(f"| Role | {' | '.join(FAULTS.values())} |\n|---|{'---|' * len(FAULTS)}")
    for role in (*ROLES, "rank"):
        print(f"| `{role}` | {' | '.join(seconds[role, number] for number in FAULTS)} |", flush=True)
    return num_wrong


def num_wrong_hangs(reference: Outcome) -> int:
    """Let a step of the engine, and one of the trainer, never return; returns how many plays went wrong."""
    num_wrong = 0
    with tempfile.TemporaryDirectory(prefix="areal-play-") as directory:
        python = Path(directory, "python")
        python.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tools.placement.hanging_worker\n")
        python.chmod(0o755)
        for role, section in (("generation", "engine"), ("trainer", "trainer")):
            settings = (*FLOAT32, f"{section}.step_timeout_seconds=5", f"scheduler.roles.{role}.python={python}")
            kills = [(2, f"{role}-0")]
            play = Play(roles=(role,), steps=4, settings=settings, kills=kills, signal=signal.SIGUSR2)
            num_wrong += not is_right(f"{role}: a step that never returns", play, reference)[0]
    return num_wrong


def performed(name: str, play: Play) -> Outcome:
    """Perform a play in a directory of its own."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="areal-play-") as directory:
        outcome = perform(play, Path(directory), timeout=SECONDS)
    after = "".join(f", {one:.1f} s to the next step" for one in outcome.recoveries)
    print(f"{name}: {outcome.attempts} attempts, {time.monotonic() - started:.0f} s{after}", flush=True)
    return outcome


def is_right(name: str, play: Play, reference: Outcome) -> tuple[bool, list[float]]:
    """Whether it ended as it would have without a fault, and the seconds from each fault to the next step."""
    try:
        outcome = performed(name, play)
        assert 0 == outcome.code, outcome.output[-4000:]
        assert [*range(1, play.steps + 1)] == [record["step"] for record in outcome.compared]
        num = min(play.steps, len(reference.compared))
        assert reference.compared[:num] == outcome.compared[:num], outcome.compared
        assert [] == marked(play.mark)
    except AssertionError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return False, []
    return True, outcome.recoveries


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
