"""``python -m tools.placement.hanging_worker``: a worker whose next step of the engine or the trainer never returns.

It hangs in one thread, after SIGUSR2: the event loop goes on and renews the lease.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from areal_actors.generation.torch.worker import StepRunner
from areal_actors.training.passes import Passes
from areal_actors.worker import main

_is_hanging = threading.Event()


def hanging(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which does not return once the signal has come."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_hanging.is_set():
            threading.Event().wait()
        return function(*args, **kwargs)

    return call


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, lambda *_: _is_hanging.set())
    StepRunner.launch = hanging(StepRunner.launch)  # type: ignore[method-assign]
    Passes.accumulate = hanging(Passes.accumulate)  # type: ignore[method-assign]
    # In place of "-m areal_actors.worker".
    del sys.argv[1:]
    main()
