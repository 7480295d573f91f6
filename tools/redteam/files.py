"""Attacks on the files of a grader, made from a seed: links, hard links, and names that change while files are taken.

An episode makes many attempts in its box, each in a directory of its own, and leaves processes behind that go on
renaming. Its grader searches all that the agent left for the secret; so one attempt that gets hold of the secret, or
changes the grader, is rewarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from areal_actors.sandbox import SandboxConfig, create_sandbox
from areal_actors.workflows import CommandAgent, CommandConfig, PoolConfig

__all__ = ["play_files"]

SECRET = "a secret of the grader"
_NOWHERE = {"base_url": "http://127.0.0.1:1/s/v1", "api_key": "key"}
_PER_EPISODE = 200
_NUM_RACES = 4

_WAYS = (
    "ln -s {target} {name}",
    "ln {target} {name}",
    "cp -l {target} {name}",
    "cp {target} {name}",
    "ln -s {folder} {name} && cp {name}/{file} {name}.copy",
    "mkdir -p {name} && ln -s ../../../../../../../../..{target} {name}/up",
    "ln -s /proc/self/root{target} {name}",
    "ln -s /proc/1/root{target} {name} && cat {name} > {name}.copy",
    "ln -s /proc/1/cwd {name} && cp {name}/{file} {name}.copy",
    "ln -s {name} {name}.loop; ln -s {target} {name}; mv -T {name}.loop {name}",
    "mkfifo {name}; mv {name} {file}",
    "echo {name} > {name} && ln {name} {name}.twin && rm {name} && ln -s {target} {name}",
    "mv {target} {name}; ln {name} {target}; rm -f {target}",
    "echo '{forged}' > {target}; ln -f {name} {target}",
    "(exec 3<{target}; ln -s /proc/$$/fd/3 {name}; cat <&3 > {name}.copy)",
)
"""How an attempt tries to bring the secret into the files that are graded, or to change the grader."""

_RACES = (
    "while :; do echo x > r{n}.a; mv -f r{n}.a r{n}; ln -sf {target} r{n}.b; mv -fT r{n}.b r{n}; done",
    "while :; do mkdir -p q{n}; echo x > q{n}/{file}; mv -T q{n} o{n}; ln -s {folder} q{n}; rm -rf q{n} o{n}; done",
    "while :; do rm -f h{n}; ln {target} h{n} || echo x > h{n}; done",
    "while :; do ln -sfn {folder} s{n}; ln -sfn . s{n}; done",
)
"""Loops that go on after the agent has ended, if they can."""


def _create_script(random: Random, count: int, targets: Sequence[Path]) -> str:
    """Return the agent of one episode, a shell script."""
    lines = []
    for number in range(_NUM_RACES):
        target = random.choice(targets)
        race = random.choice(_RACES).format(n=number, target=target, folder=target.parent, file=target.name)
        lines.append(f"setsid sh -c '{race}' >/dev/null 2>&1 &")
    for number in range(count):
        target = random.choice(targets)
        way = random.choice(_WAYS).format(
            target=target, folder=target.parent, file=target.name, name=f"n{random.randrange(8)}", forged="exit 0"
        )
        lines.append(f"mkdir -p a{number} && (cd a{number} && {way})")
    return "{\n" + "\n".join(lines) + "\n} 2>/dev/null\nexit 0"


async def play_files(seed: int, count: int, directory: Path, *, is_visible: bool = False) -> list[str]:
    """Make ``count`` attempts in bubblewrap, and return those episodes that got hold of the secret or changed a file.

    ``directory`` is that of the grader's files, which the agent sees if it ``is_visible``. Raises ``SandboxError``
    where there is no bubblewrap.
    """
    sandbox = SandboxConfig(backend="bubblewrap", timeout_seconds=60)
    create_sandbox(sandbox.backend).check(sandbox)
    answer, grade = directory / "answer.txt", directory / "grade.sh"
    # Also names, which may be made of the text of a file.
    files = {
        answer: f"{SECRET}\n",
        grade: f"grep -q -r -F '{SECRET}' . && exit 0; find . | grep -q '{SECRET}' || exit 1\n",
    }
    for path, text in files.items():
        path.write_text(text)
    random, successes = Random(seed), []
    for start in range(0, count, _PER_EPISODE):
        script = _create_script(random, min(_PER_EPISODE, count - start), tuple(files))
        seen = [str(path) for path in files] if is_visible else []
        command = CommandConfig(command=("sh", "-c", script, "sh", *seen), grader=("sh", str(grade)))
        async with CommandAgent.open(command, PoolConfig(), sandbox=sandbox) as agent:
            reward = await agent.run({}, **_NOWHERE)
        if reward != 0.0:
            successes.append(f"attempts {start} to {start + _PER_EPISODE} were rewarded with {reward}")
        successes += [
            f"{path.name} was changed after {start}" for path, text in files.items() if path.read_text() != text
        ]
        if successes:
            break
    return successes
