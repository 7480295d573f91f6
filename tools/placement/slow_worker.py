"""``python -m tools.placement.slow_worker``: a worker to which reading the modules of its role takes seconds.

As from a network filesystem, or on a node that others keep busy.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from areal_actors.worker import main

SECONDS = 14.0
SLOW = ("areal_actors.training.actor", "areal_actors.generation.torch")


class SlowFinder(MetaPathFinder):
    """Finds nothing, and takes its time for it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Wait, if the module is one of the slow ones."""
        if fullname in SLOW:
            time.sleep(SECONDS)
        return None


if __name__ == "__main__":
    sys.meta_path.insert(0, SlowFinder())
    # In place of "-m areal_actors.worker".
    del sys.argv[1:]
    main()
