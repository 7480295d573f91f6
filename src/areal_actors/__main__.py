"""``python -m areal_actors``, and the script ``areal-actors``: the command line, implemented in ``cli``."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def _leave(*_: object) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(130)  # an exception could become another one inside a module that is being imported


# Ctrl-C in the tenth of a second that the imports take leaves without a traceback. A script starts a command that ends
# in & with the signal ignored; a run heeds it from its first step on, and so does the command from its start. Threads,
# on which programs may import this module, cannot set it.
if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN):
    with suppress(ValueError):
        signal.signal(signal.SIGINT, _leave)
try:
    from areal_actors.cli import main
finally:
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)

if __name__ == "__main__":
    main()
