"""``python -m tools.chaos.witnessed_worker ROLE``: a worker process with the witness of its role.

The point at which it kills itself is in the file ``trap``, which it removes when it is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tools.chaos.service import Witness, witness_journal, witness_sampling, witness_training

from areal_actors.worker import main

WITNESSES = {"sessions": witness_journal, "generation": witness_sampling, "trainer": witness_training}


def watch(role: str) -> None:
    """Wrap what the role does."""
    directory = Path(os.environ["CHAOS_DIRECTORY"])
    trap = directory / "trap"
    # A process, as its start on the clock names it, is one life of the weights that it holds.
    life = time.monotonic_ns()
    WITNESSES[role](Witness(directory, life=life, trap_file=trap, stage=Path(os.devnull)))


if __name__ == "__main__":
    watch(sys.argv.pop(1))
    main()
