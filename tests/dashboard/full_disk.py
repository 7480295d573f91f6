"""Writers of a run on a file system that is full for a while: the program of a test, which runs on a small one."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import anyio
from tests.dashboard.conftest import News

from areal_actors.dashboard.dumps import FailureWriter, RolloutDumper
from areal_actors.dashboard.files import RunDirectory
from areal_actors.dashboard.reporter import ProgressReporter
from areal_actors.dashboard.samples import SessionSampler
from areal_actors.kernel import ActorSystem
from areal_actors.messages import PhaseChanged


def decode(ids) -> str:
    return "".join(f" {token}" for token in ids)


async def main(path: Path) -> None:
    """Write some news, more on a full disk, and the rest when there is space again."""
    news, directory = News(), RunDirectory(path=path)
    listeners = [
        FailureWriter(directory.failures),
        SessionSampler(directory.sessions, decode=decode),
        RolloutDumper(directory, decode=decode),
    ]
    ballast = path / "ballast"
    async with ActorSystem.open() as system:
        progress = await system.spawn(ProgressReporter(listeners), name="progress")
        for position in range(9):
            if position == 3:
                with ballast.open("wb", buffering=0) as file:
                    while True:
                        try:
                            file.write(bytes(1024))
                        except OSError:
                            break
            if position == 6:
                ballast.unlink()
            await progress.ask(news.session(position, version=position, text="question " * 600))
            await progress.ask(news.episode(position, version=position, failure="it broke " * 600))
            await progress.ask(news.episode(position, version=position, member=1))
            await progress.ask(PhaseChanged(phase="training"))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
    anyio.run(main, Path(sys.argv[1]))
