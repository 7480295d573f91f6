"""``python -m tools.frameworks NAME ...``: train agents for a step, and run them elsewhere."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tools.frameworks.training import load_frameworks, run_elsewhere, train_one_step


def main() -> int:
    """Train what the command line names. Fails if something is wrong with one of the runs."""
    frameworks = load_frameworks()
    parser = argparse.ArgumentParser(prog="python -m tools.frameworks", description=__doc__)
    parser.add_argument("frameworks", nargs="+", metavar="framework", choices=list(frameworks))
    has_failed = False
    parser.add_argument("--python", default=sys.executable, help="of the environment that has the framework")
    arguments = parser.parse_args()
    for name in arguments.frameworks:
        framework = frameworks[name]
        with tempfile.TemporaryDirectory() as directory:
            wrong = [*train_one_step(framework.config, Path(directory) / "run", python=arguments.python)]
            if not framework.program:  # a command is never given anything but its environment
                wrong += run_elsewhere(framework.config, Path(directory), python=arguments.python)
        has_failed |= bool(wrong)
        print(name, "\n  ".join(["does not train:", *wrong]) if wrong else "trains", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
