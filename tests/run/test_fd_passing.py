"""The listening socket of a run, handed out to whoever comes, and to whoever leaves again at once."""

from __future__ import annotations

import socket

import anyio
import pytest

from areal_actors.run.control_plane import receive_fd, serve_fd

pytestmark = pytest.mark.anyio


async def test_who_leaves_before_it_was_served_harms_nobody(tmp_path):
    """A proxy may be killed in any moment; the controller lives on, and the next one is handed the socket."""
    path = tmp_path / "door.sock"
    with anyio.fail_after(10), socket.create_server(("127.0.0.1", 0)) as listener:
        async with serve_fd(listener, path):
            for _ in range(5):
                with socket.socket(socket.AF_UNIX) as hasty:
                    hasty.connect(str(path))
            with await receive_fd(path) as fetched:
                assert listener.getsockname() == fetched.getsockname()


async def test_nobody_at_the_door_is_an_error_of_its_own(tmp_path):
    """Also if the controller leaves just then."""
    path = tmp_path / "door.sock"
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        with pytest.raises(OSError, match="refused"):
            await receive_fd(path)
        door.listen()
        async with anyio.create_task_group() as tasks:

            async def leave() -> None:
                await anyio.wait_readable(door)
                door.accept()[0].close()

            tasks.start_soon(leave)
            with anyio.fail_after(10), pytest.raises(OSError, match=r"door\.sock"):
                await receive_fd(path)
