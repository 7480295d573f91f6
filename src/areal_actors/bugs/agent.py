"""An agent without tools that repairs bugs: it asks once, and puts the answer in the place of the line or function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anyio import to_thread

from areal_actors.bugs.runner import grade_choice
from areal_actors.bugs.tasks import Level, create_messages, read_bug, splice
from areal_actors.datasets import load_task
from areal_actors.errors import ConfigError, EpisodeError
from areal_actors.sandbox import SandboxConfig, SandboxKind, create_sandbox, scratch_directory
from areal_actors.workflows.task_directories import check_task, grade_files

__all__ = ["FixFunction"]


class FixFunction:
    """Repairs bugs of level 0 to 2 by one request; for models that are too small for tools.

    The reward is that of the task's verifier, which runs in a box; at level 0, it is whether the letter is right.
    """

    def __init__(
        self,
        *,
        sandbox: str = "bubblewrap",
        temperature: float = 1.0,
        max_tokens: int | None = None,
        has_examples: bool = True,
    ) -> None:
        """Configure the agent.

        Args:
            sandbox: the box of the verifier: bubblewrap, or none where bubblewrap cannot run.
            temperature: that of the request.
            max_tokens: of the answer; by default 2, 48 and 512 at the levels 0, 1 and 2.
            has_examples: whether four solved examples come first, at the levels 0 and 1.

        Raises:
            ConfigError: there is no such sandbox.
            SandboxError: it cannot be opened here.
        """
        if sandbox not in (SandboxKind.BUBBLEWRAP, SandboxKind.NONE):
            raise ConfigError(f"sandbox must be bubblewrap or none, not {sandbox!r}.")
        self._config = SandboxConfig(backend=SandboxKind(sandbox))
        create_sandbox(self._config.backend).check(self._config)
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._has_examples = has_examples

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Ask for a repair of the problem's bug, and return its reward. Raises ``EpisodeError``."""
        try:
            directory = Path(data["task_directory"])
            bug = await to_thread.run_sync(read_bug, directory)
            messages = create_messages(bug, has_examples=self._has_examples)
        except (KeyError, OSError, ValueError) as error:
            raise EpisodeError(f"The problem has no bug that can be asked for: {error!r}") from error
        limits = {Level.CHOICE: 2, Level.LINE: 48}
        answered = await extra_kwargs["http_client"].post(
            f"{extra_kwargs['base_url']}/chat/completions",
            json={
                "model": "policy",
                "messages": messages,
                "temperature": self._temperature,
                "max_tokens": self._max_tokens or limits.get(Level(bug["level"]), 512),
            },
            headers={"Authorization": f"Bearer {extra_kwargs['api_key']}"},
        )
        answered.raise_for_status()
        answer = answered.json()["choices"][0]["message"]["content"] or ""
        if "answer" in bug:
            # A letter runs nothing, and needs no box: 0.2 s of CPU time for each episode.
            return grade_choice(bug, answer)
        task = await to_thread.run_sync(load_task, directory)
        check_task(task, self._config)
        with scratch_directory() as files:
            # As take_files lays them out: the working directory is the first.
            path = files / "0" / bug["path"]
            path.parent.mkdir(parents=True)
            source = (directory / "environment" / bug["path"]).read_text(encoding="utf-8")
            path.write_text(splice(bug, source, answer), encoding="utf-8")
            verdict = await grade_files(task, files, self._config)
        return verdict.reward
