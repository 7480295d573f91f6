"""``python -m tests.frameworks NAME ...``: train the agent of each framework for a step, and say what came of it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.frameworks.training import load_frameworks, train_one_step


def main() -> int:
    """Train what the command line names. Fails if something is wrong with one of the runs."""
    frameworks = load_frameworks()
    parser = argparse.ArgumentParser(prog="python -m tests.frameworks", description=__doc__)
    parser.add_argument("frameworks", nargs="+", metavar="framework", choices=list(frameworks))
    has_failed = False
    for name in parser.parse_args().frameworks:
        with tempfile.TemporaryDirectory() as directory:
            wrong = train_one_step(frameworks[name].config, Path(directory) / "run")
        has_failed |= bool(wrong)
        print(name, "\n  ".join(["does not train:", *wrong]) if wrong else "trains", flush=True)  # noqa: T201
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
