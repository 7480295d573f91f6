"""The contract of every ``SandboxBackend``, as checks that you can run against your own.

Each check is a coroutine function that takes ``open_box``, which opens a new box with the given settings changed, and
raises ``AssertionError`` if the contract is broken. ``ISOLATION_CHECKS`` hold for backends that isolate::

    @pytest.mark.anyio
    @pytest.mark.parametrize("check", SANDBOX_CHECKS)
    async def test_my_sandbox_keeps_the_contract(check):
        await check(open_my_box)
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import anyio

from areal_actors.errors import SandboxError, SandboxLimit
from areal_actors.sandbox import Completed, Sandbox

OpenBox: TypeAlias = Callable[..., AbstractAsyncContextManager[Sandbox]]
"""Opens a box; keyword arguments change settings of ``SandboxConfig``, ``proxy_url`` the reachable address."""
Check: TypeAlias = Callable[[OpenBox], Awaitable[None]]

_PATIENCE_SECONDS = 30.0


async def _sh(box: Sandbox, script: str, **options: Any) -> Completed:
    with anyio.fail_after(_PATIENCE_SECONDS):
        return await box.run(["sh", "-c", script], **options)


async def check_a_command_has_output_and_a_status(open_box: OpenBox) -> None:
    """Standard output, standard error and the exit status are told apart; a signal is a negative status."""
    async with open_box() as box:
        ended = await _sh(box, "cat; echo error >&2; exit 3", stdin=b"problem")
        killed = await _sh(box, "kill -9 $$")
        succeeded = await _sh(box, "true")

    assert (ended.status, ended.stdout, ended.stderr) == (3, b"problem", b"error\n")
    assert killed.status == -9
    assert succeeded.is_successful


async def check_an_unknown_program_is_a_status(open_box: OpenBox) -> None:
    """A program that does not exist ends with 127, as in a shell, and its name is on standard error."""
    async with open_box() as box:
        with anyio.fail_after(_PATIENCE_SECONDS):
            ended = await box.run(["no-such-program"])

    assert ended.status == 127
    assert b"no-such-program" in ended.stderr or b"No such file" in ended.stderr


async def check_a_command_has_its_environment(open_box: OpenBox) -> None:
    """A command sees the variables that it is given, and none of the runner's that were not named."""
    os.environ["AREAL_CONTRACT_SECRET"] = "secret"  # noqa: S105
    try:
        async with open_box() as box:
            ended = await _sh(box, "env", environment={"GIVEN": "a b\nc"})
    finally:
        del os.environ["AREAL_CONTRACT_SECRET"]

    assert b"GIVEN=a b\nc\n" in ended.stdout
    assert b"secret" not in ended.stdout


async def check_commands_share_their_box(open_box: OpenBox) -> None:
    """Commands start in the empty working directory, or below it, and see each other's files; boxes do not."""
    async with open_box() as box:
        empty = await _sh(box, "ls -A; pwd")
        await _sh(box, "echo text > file", directory="below")
        read = await _sh(box, f"cat {box.work_directory}/below/file")
        async with open_box() as other:
            unseen = await _sh(other, "ls -A")

    assert empty.stdout.decode().split() == [box.work_directory]
    assert read.stdout == b"text\n"
    assert unseen.stdout == b""


async def check_output_is_passed_on_and_its_end_kept(open_box: OpenBox) -> None:
    """Chunks are passed on as they arrive; of much output, the end is returned."""
    received = bytearray()
    async with open_box() as box:
        ended = await _sh(box, "yes | head -c 3000000; echo end", on_stdout=received.extend)

    assert len(received) == 3_000_004
    assert ended.stdout == bytes(received[-len(ended.stdout) :])
    assert ended.stdout.endswith(b"end\n")
    assert len(ended.stdout) == 1024 * 1024


async def check_files_are_copied_in_and_out(open_box: OpenBox) -> None:
    """Files keep their content and whether they can be executed; what does not exist is an error."""
    with tempfile.TemporaryDirectory() as name:
        source, target = Path(name, "source"), Path(name, "target")
        (source / "sub").mkdir(parents=True)
        (source / "sub" / "data").write_bytes(bytes(range(256)) * 1000)
        (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (source / "run.sh").chmod(0o755)
        async with open_box() as box:
            with anyio.fail_after(_PATIENCE_SECONDS):
                await box.copy_in(source, "in")
                await box.copy_in(source / "run.sh", "single")
                ran = await _sh(box, "in/run.sh && single/run.sh && ln -s sub/data in/link")
                left_out = await box.copy_out("in", target)
                try:
                    await box.copy_out("missing", target)
                except SandboxError:
                    pass
                else:
                    raise AssertionError("a copy of a missing directory did not fail")

        assert ran.stdout == b"ran\nran\n", ran
        assert left_out == ()
        assert (target / "sub" / "data").read_bytes() == (source / "sub" / "data").read_bytes()
        assert os.access(target / "run.sh", os.X_OK)
        assert (target / "link").read_bytes() == (source / "sub" / "data").read_bytes()


async def check_links_that_lead_out_are_not_copied(open_box: OpenBox) -> None:
    """A result with links to files outside is copied without them, also where one link leads out by another one."""
    script = (
        "mkdir -p tree/d && cd tree && ln -s /etc/passwd absolute && ln -s ../../../../etc/passwd relative"
        " && ln -s . d/here && ln -s here/../../.. d/indirect"
        " && mkfifo pipe && echo kept > kept && ln -s ../kept d/inside"
    )
    with tempfile.TemporaryDirectory() as name:
        async with open_box() as box:
            made = await _sh(box, script)
            left_out = await box.copy_out("tree", Path(name, "target"))
        found = {path.relative_to(Path(name, "target")).as_posix() for path in Path(name, "target").rglob("*")}

    assert made.is_successful, made.stderr
    assert found == {"kept", "d", "d/here", "d/inside"}, (found, left_out)
    assert {Path(entry).name for entry in left_out} >= {"absolute", "relative", "indirect"}


async def check_a_copy_that_fails_is_an_error(open_box: OpenBox) -> None:
    """A place that cannot be written, or does not exist, is an error; the box can still be used."""
    with tempfile.TemporaryDirectory() as name:
        async with open_box() as box:
            await _sh(box, "mkdir tree; echo text > tree/file; echo text > place")
            for copying in (box.copy_in(Path(name), "place/below"), box.copy_out("nowhere/else", Path(name))):
                try:
                    with anyio.fail_after(_PATIENCE_SECONDS):
                        await copying
                except SandboxError:
                    continue
                raise AssertionError("the copy did not fail")
            assert await box.copy_out("tree", Path(name)) == ()


async def check_time_is_limited(open_box: OpenBox) -> None:
    """A command that takes too long is killed, with the processes of its group; the box can still be used."""
    async with open_box() as box:
        try:
            await _sh(box, "sleep 100 & sleep 100", timeout_seconds=0.3)
        except SandboxLimit as limit:
            assert limit.limit == "timeout_seconds"
        else:
            raise AssertionError("the time limit was not enforced")
        assert (await _sh(box, "echo still here")).stdout == b"still here\n"


async def check_cancelling_kills_the_command(open_box: OpenBox) -> None:
    """A cancelled run leaves no process of its group; the box can still be used."""
    async with open_box() as box:
        with anyio.move_on_after(0.3):
            await _sh(box, "while true; do echo alive >> beat; sleep 0.05; done")
        ended = await _sh(box, "wc -c < beat; sleep 0.3; wc -c < beat")

    before, after = ended.stdout.split()
    assert before == after


async def check_commands_run_at_the_same_time(open_box: OpenBox) -> None:
    """Two commands that wait for each other both end."""
    async with open_box() as box:
        with anyio.fail_after(_PATIENCE_SECONDS):
            await _sh(box, "mkfifo one two")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_sh, box, "echo > one; cat two")
                tasks.start_soon(_sh, box, "cat one; echo > two")


async def check_errors_of_the_block_are_raised_unchanged(open_box: OpenBox) -> None:
    """An error of the block leaves it as it is, not in a group."""
    try:
        async with open_box():
            raise LookupError("of the block")
    except LookupError:
        return
    raise AssertionError("the error was lost")


SANDBOX_CHECKS: tuple[Check, ...] = (
    check_a_command_has_output_and_a_status,
    check_an_unknown_program_is_a_status,
    check_a_command_has_its_environment,
    check_commands_share_their_box,
    check_output_is_passed_on_and_its_end_kept,
    check_files_are_copied_in_and_out,
    check_links_that_lead_out_are_not_copied,
    check_a_copy_that_fails_is_an_error,
    check_time_is_limited,
    check_cancelling_kills_the_command,
    check_commands_run_at_the_same_time,
    check_errors_of_the_block_are_raised_unchanged,
)


# ------------------------------------------------------------------------------------------------- isolation


async def check_files_of_the_host_are_hidden(open_box: OpenBox) -> None:
    """A file of the host that was not named cannot be read, and nothing of the system can be written."""
    with tempfile.NamedTemporaryFile() as secret:
        async with open_box() as box:
            ended = await _sh(box, f"cat {secret.name} || echo hidden; touch /usr/x /etc/x /x /dev/x || echo read-only")

    assert ended.stdout == b"hidden\nread-only\n"


async def check_the_kernel_cannot_be_set(open_box: OpenBox) -> None:
    """Settings of the kernel cannot be written, even if the runner is root: one names a program that the host runs."""
    script = (
        "for file in core_pattern modprobe pid_max; do"
        " v=$(cat /proc/sys/kernel/$file); echo $v > /proc/sys/kernel/$file && echo written; done"
    )
    # A file of /sys names a program, too. Only asked whether it may be written: other values could harm the host.
    search = (
        "import itertools, os\n"
        "tops = ('/sys', '/proc/irq', '/proc/sys', '/proc/fs')\n"
        "for path, _, names in itertools.chain.from_iterable(map(os.walk, tops)):\n"
        "    for name in names:\n"
        "        if os.access(f'{path}/{name}', os.W_OK): print(path, name)\n"
    )
    async with open_box() as box:
        ended = await _sh(box, f"{script}; echo h > /proc/sysrq-trigger && echo triggered; id")
        writable = await box.run(["python3", "-c", search])

    assert b"written" not in ended.stdout
    assert b"triggered" not in ended.stdout
    assert writable.stdout == b""


async def check_processes_of_the_host_are_hidden(open_box: OpenBox) -> None:
    """A command sees the processes of its box only, and cannot end process 1, nor read its environment."""
    async with open_box() as box:
        ended = await _sh(box, "kill -9 1; cat /proc/[0-9]*/environ >&2; ls -d /proc/[0-9]* | wc -l")

    assert int(ended.stdout) <= 5
    assert b"PYTEST" not in ended.stderr


async def check_only_the_proxy_is_reachable(open_box: OpenBox) -> None:
    """The model's address answers; other ports of the host and other machines do not."""
    script = (
        "import socket, sys\n"
        "for address in [('127.0.0.1', int(sys.argv[2])), ('8.8.8.8', 53), ('192.168.0.1', 80)]:\n"
        "    try:\n"
        "        socket.create_connection(address, 1).close(); print('open', address)\n"
        "    except OSError: pass\n"
        "import urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())\n"
    )
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nmodel"

    async def serve(stream: Any) -> None:
        async with stream:
            await stream.receive()
            await stream.send(answer)

    results: list[Completed] = []
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as model,
        await anyio.create_tcp_listener(local_host="127.0.0.1") as other,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(model.serve, serve)
        url = f"http://127.0.0.1:{_port(model)}/session/v1"
        for network in ("proxy", "none"):
            async with open_box(proxy_url=url, network=network) as box:
                with anyio.fail_after(_PATIENCE_SECONDS):
                    results.append(await box.run(["python3", "-c", script, str(box.proxy_url), str(_port(other))]))
        tasks.cancel_scope.cancel()

    reached, unreachable = results
    assert reached.stdout == b"model\n", reached
    assert not unreachable.is_successful


def _port(listener: Any) -> int:
    port: int = listener.extra(anyio.abc.SocketAttribute.local_port)
    return port


async def check_memory_is_limited(open_box: OpenBox) -> None:
    """Processes that use too much memory together end, and the runner does not."""
    together = "import os\nfor _ in range(3): os.fork()\nx = bytearray(24 << 20)\nimport time; time.sleep(100)"
    nameless = (
        "import os, time\n"
        "files = [os.memfd_create('x') for _ in range(20)]\n"
        "for file in files: os.write(file, bytes(8 << 20))\n"
        "time.sleep(100)"
    )
    for script in (together, nameless):
        async with open_box(memory_mib=64) as box:
            alone = await box.run(["python3", "-c", "bytearray(1 << 30)"])
            limit = await _exceeded(box, ["python3", "-c", script])

        assert not alone.is_successful
        assert limit in ("memory_mib", None)


async def check_processes_are_limited(open_box: OpenBox) -> None:
    """A fork bomb ends."""
    async with open_box(max_processes=40) as box:
        await _exceeded(box, ["sh", "-c", "bomb() { bomb | bomb & }; bomb; sleep 100"], timeout_seconds=1)


async def check_the_disk_is_limited(open_box: OpenBox) -> None:
    """More bytes than the limit cannot be written."""
    async with open_box(disk_mib=4) as box:
        ended = await _sh(box, "head -c 10000000 /dev/zero > a; head -c 10000000 /dev/zero > b; wc -c < a")
        limit = await _exceeded(box, ["sh", "-c", "i=0; while true; do i=$((i+1)); : > $i; done"], timeout_seconds=10)

    assert int(ended.stdout or 0) <= 4 * 1024 * 1024
    assert limit == "disk_mib"


async def check_daemons_end_with_the_box(open_box: OpenBox) -> None:
    """A process that left its session and its group runs on after its command, and ends with the box."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        async with open_box(writable=(Path(name),)) as box:
            script = (
                f"cd {name}; setsid sh -c 'while true; do echo >> beat; sleep 0.02; done' </dev/null >/dev/null 2>&1 &"
            )
            await _sh(box, script)
            await _sh(box, f"while [ ! -s {name}/beat ]; do sleep 0.02; done")
        size = Path(name, "beat").stat().st_size
        await anyio.sleep(0.2)

        assert Path(name, "beat").stat().st_size == size


async def _exceeded(box: Sandbox, command: list[str], *, timeout_seconds: float = _PATIENCE_SECONDS) -> str | None:
    """Return the limit that ended the command; ``None`` if the kernel ended it."""
    with anyio.fail_after(_PATIENCE_SECONDS):
        try:
            await box.run(command, timeout_seconds=timeout_seconds)
        except SandboxLimit as limit:
            return limit.limit
        except SandboxError:
            return None
    return None


ISOLATION_CHECKS: tuple[Check, ...] = (
    check_files_of_the_host_are_hidden,
    check_the_kernel_cannot_be_set,
    check_processes_of_the_host_are_hidden,
    check_only_the_proxy_is_reachable,
    check_memory_is_limited,
    check_processes_are_limited,
    check_the_disk_is_limited,
    check_daemons_end_with_the_box,
)
