"""Train every job on three seeds, write the table, and fail if a job stays behind: ``python -m tools.credit``.

Arguments are seeds and names of jobs; with any of them, the table is printed and not written.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attrs import asdict

from tools.credit.jobs import CONTRAST, JOBS, REFERENCE, Outcome, run_job, write_results

SEEDS = (1, 2, 3)
SHARE = 0.95
"""How much of the reference's reward every job reaches."""


def main(arguments: Sequence[str]) -> int:
    """Return 1 if a job stays behind the reference."""
    seeds = [int(argument) for argument in arguments if argument.isdigit()] or list(SEEDS)
    names = [argument for argument in arguments if argument in JOBS] or list(JOBS)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        results = {name: [_run(name, root, seed) for seed in seeds] for name in names}
        if not arguments:
            contrasts = {name: _run(name, root, seeds[0], **CONTRAST) for name in names}
            write_results(results, contrasts)
    if REFERENCE not in results:
        return 0
    references = [outcome.after for outcome in results[REFERENCE]]
    behind = [
        f"{name}, seed {seed}: {outcome.after:.3f}, the reference {reference:.3f}"
        for name, outcomes in results.items()
        for seed, outcome, reference in zip(seeds, outcomes, references, strict=True)
        if outcome.after < SHARE * reference
    ]
    print("\n".join(["", f"{len(behind)} jobs stay behind.", *behind]))
    return int(bool(behind))


def _run(name: str, root: Path, seed: int, **settings: object) -> Outcome:
    outcome = run_job(JOBS[name], root, seed=seed, **settings)
    values = "  ".join(f"{key} {value:.3f}" for key, value in asdict(outcome).items())
    print(f"{name}, seed {seed}{', ' + str(settings) if settings else ''}: {values}", flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
