"""Reward functions with long computations, run in worker processes so that the event loop is not blocked.

anyio's worker processes are used: each is a fresh interpreter (nothing is forked), they are reused, their number is
bounded, cancelling the caller kills its process, and they end with the event loop, on asyncio as well as on trio.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
from anyio import BrokenWorkerProcess, to_process

from areal_actors.errors import ConfigError, EpisodeError
from areal_actors.workflows.agents import describe_error


class AsyncRewardWrapper:
    """``await wrapped(*args, **kwargs)`` is ``reward_fn(*args, **kwargs)``, in a worker process.

    ::

        reward_fn = AsyncRewardWrapper(score)
        reward = await reward_fn(prompt, answer, **data)

    All such functions share as many processes as there are cores. What the function prints is discarded.
    """

    def __init__(self, reward_fn: Callable[..., Any], *, timeout_seconds: float | None = 60.0) -> None:
        """Wrap a function.

        Args:
            reward_fn: a function at the top level of a module, or another callable that can be pickled.
            timeout_seconds: limit of one call, including its wait for a worker; ``None`` waits without limit.

        Raises:
            ConfigError: it cannot be sent to a process, or a setting makes no sense.
        """
        if timeout_seconds is not None and timeout_seconds <= 0:
            raise ConfigError(f"timeout_seconds must be positive, not {timeout_seconds:g}.")
        self._name = getattr(reward_fn, "__qualname__", type(reward_fn).__name__)
        try:
            # Tried at once, so that a function that cannot be sent is refused before any episode.
            pickle.loads(pickle.dumps(reward_fn))  # noqa: S301 - created on the same line
        except Exception as error:
            raise ConfigError(
                f"Reward function {self._name} cannot be sent to a worker process ({error}); define it at the top "
                "level of a module, not within a function or as a lambda."
            ) from error
        self._function = reward_fn
        self._timeout_seconds = timeout_seconds

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the function. Cancelling kills the worker that runs it.

        Raises:
            EpisodeError: the function raised, took too long, killed its worker, or its arguments or its result
                cannot be sent between processes.
        """
        call = partial(self._function, *args, **kwargs)
        with anyio.move_on_after(self._timeout_seconds):
            try:
                is_successful, value = await to_process.run_sync(_run, call, cancellable=True)
            except BrokenWorkerProcess:
                message = f"Reward function {self._name} killed its worker process, or something else did."
            except Exception as error:
                raise EpisodeError(
                    f"The call of reward function {self._name} cannot be sent to a process: {describe_error(error)}"
                ) from error
            else:
                if is_successful:
                    return value
                raise EpisodeError(f"Reward function {self._name} raised {value}")
            if getattr(self._function, "__module__", None) == "__main__":
                # A worker imports the script to find the function, and would run all of it.
                message += (
                    " It is defined in the script that runs, which each worker imports: put what the script runs below "
                    '`if __name__ == "__main__":`, or the function in a module.'
                )
            raise EpisodeError(message)
        raise EpisodeError(
            f"Reward function {self._name} took longer than {self._timeout_seconds:g} s, with the start of its "
            "worker, and was killed. Raise timeout_seconds if the function or its imports need more."
        )


def _run(call: Callable[[], Any]) -> tuple[bool, Any]:
    """Call the function in the worker; return whether it succeeded, and its result or its error.

    Errors are sent as text, because not every exception can be pickled.
    """
    try:
        value = call()
        pickle.dumps(value)
    except BaseException as error:  # noqa: BLE001 - raised by the caller, as its own error
        # anyio would send KeyboardInterrupt and SystemExit to the caller as they are, and there they would end the run.
        return False, describe_error(error)
    return True, value
