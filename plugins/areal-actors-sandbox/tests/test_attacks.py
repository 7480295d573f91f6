"""Attacks on a box of bubblewrap from inside, and on the runner that takes its files and its output."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_actors.errors import SandboxError, SandboxLimit
from areal_actors.lib.scratch import scratch_directory
from areal_actors.sandbox import BoxRequest, Completed, SandboxConfig, create_sandbox
from areal_actors_sandbox import box as box_module

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


def open_box(**limits: Any):
    """A box of bubblewrap; skips where none can be opened."""
    config = SandboxConfig(backend="bubblewrap", **limits)
    backend = create_sandbox("bubblewrap")
    try:
        backend.check(config)
    except SandboxError as error:
        pytest.skip(str(error))
    return backend.open(BoxRequest(config=config))


async def run_python(script: str, **limits: Any) -> Completed:
    """Run a script in a box of these limits."""
    with anyio.fail_after(30):
        async with open_box(**limits) as box:
            return await box.run([sys.executable, "-c", script])


SYSTEM_CALLS = {
    "memory without a name": "libc.memfd_create(b'x', 0)",
    "a queue of messages in the kernel": "libc.msgget(0, 0o1600)",
    "keys of the runner": "libc.syscall({keyctl}, 11, -3, 0, 0)",
    "kernel programs": "libc.syscall({bpf}, 0, 0, 0)",
    "a ring of system calls": "libc.syscall({io_uring_setup}, 1, 0)",
    "a socket to the host of this virtual machine": "libc.socket(40, 1, 0)",
    "the kernel's ciphers": "libc.socket(38, 5, 0)",
}
NUMBERS = {"x86_64": {"keyctl": 250, "bpf": 321, "io_uring_setup": 425}}.get(
    os.uname().machine, {"keyctl": 219, "bpf": 280, "io_uring_setup": 425}
)


@pytest.mark.parametrize("call", SYSTEM_CALLS.values(), ids=SYSTEM_CALLS.keys())
async def test_system_calls_that_namespaces_do_not_confine_are_refused(call: str):
    """They fail as on a kernel without them, whatever the arguments."""
    script = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
    ended = await run_python(script + f"print({call.format(**NUMBERS)}, ctypes.get_errno())")

    assert ended.stdout.decode().split()[0] == "-1", ended
    assert int(ended.stdout.decode().split()[1]) in (38, 97)  # ENOSYS, EAFNOSUPPORT


async def test_programs_that_use_sockets_and_threads_are_not_hindered():
    """TCP, UNIX and netlink sockets, threads, and semaphores work."""
    ended = await run_python(
        "import socket, threading, multiprocessing as m\n"
        "socket.socketpair(); socket.create_server(('127.0.0.1', 0)); socket.if_nameindex(); m.Lock()\n"
        "t = threading.Thread(target=print, args=['thread']); t.start(); t.join()"
    )

    assert ended.stdout == b"thread\n", ended


async def test_memory_limit_counts_detached_shared_memory():
    """A segment of System V belongs to no process once it is detached."""
    script = (
        "import ctypes, time; libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p\n"
        "libc.shmdt.argtypes = [ctypes.c_void_p]\n"
        "for _ in range(16):\n"
        "    segment = libc.shmget(0, 8 << 20, 0o1600); address = libc.shmat(segment, None, 0)\n"
        "    ctypes.memset(ctypes.c_void_p(address), 1, 8 << 20); libc.shmdt(address)\n"
        "time.sleep(20)"
    )
    with pytest.raises(SandboxLimit, match="more than 64 MiB of memory"):
        await run_python(script, memory_mib=64)


async def test_memory_of_a_process_whose_first_thread_has_ended_counts():
    """The process is a zombie then, for which /proc shows no memory."""
    script = (
        "import ctypes, threading, time\n"
        "def hold():\n"
        "    held = [bytearray(8 << 20) for _ in range(3)]; time.sleep(20)\n"
        "threading.Thread(target=hold).start(); time.sleep(0.3); ctypes.CDLL(None).pthread_exit(None)"
    )
    with anyio.fail_after(30):
        async with open_box(memory_mib=64) as box:
            with pytest.raises(SandboxLimit, match="more than 64 MiB of memory"):
                await box.run(["sh", "-c", 'for i in 1 2 3 4; do "$0" -c "$1" & done; wait', sys.executable, script])


async def test_memory_limit_counts_standard_input():
    """It is in memory, too, and cannot be written or grow."""
    async with open_box() as box:
        ended = await box.run(["sh", "-c", "cat; echo more > /proc/self/fd/0"], stdin=b"problem")

    assert (ended.stdout, ended.is_successful) == (b"problem", False)


async def test_a_box_ends_before_the_runner_if_memory_runs_out():
    """A command cannot take back the score by which the kernel chooses."""
    async with open_box() as box:
        ended = await box.run(["sh", "-c", "echo 0 > /proc/self/oom_score_adj; cat /proc/self/oom_score_adj"])

    assert ended.stdout == b"1000\n"


async def test_process_limit_counts_threads():
    """They take the same numbers of the machine."""
    script = (
        "import threading, time\n"
        "for _ in range(60): threading.Thread(target=time.sleep, args=[20], daemon=True).start()\n"
        "time.sleep(20)"
    )
    with pytest.raises(SandboxError, match=r"more than 30 processes|RuntimeError"):
        ended = await run_python(script, max_processes=30)
        raise SandboxError(ended.stderr.decode())


async def test_descriptors_of_the_runner_are_not_inherited():
    """Not those with high numbers either, of which a busy runner has many; the box starts nevertheless."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip("the limit of open files is too low")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3000, hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        async with open_box() as box:
            with anyio.fail_after(10):
                ended = await box.run(["sh", "-c", "ls /proc/$$/fd"])
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert set(ended.stdout.split()) <= {b"0", b"1", b"2", b"10"}


@pytest.mark.parametrize(
    "loop",
    [
        "kill -STOP -1",
        "mkdir -p d; echo x > d/f; mv -T d e; ln -s / d; rm -rf d e",
        "mkfifo f; mv -f f answer; echo 1 > f; mv -f f answer",
    ],
)
async def test_processes_are_stopped_while_files_are_copied(loop: str, tmp_path: Path):
    """What an agent leaves running neither stops the copy nor changes files meanwhile, and goes on after it."""
    async with open_box() as box:
        script = f"setsid sh -c 'while true; do {loop}; date +%N > now; done' >/dev/null 2>&1 &"
        await box.run(["sh", "-c", script])
        with anyio.fail_after(60):
            for number in range(10):
                await box.copy_out(".", tmp_path / str(number))
            if "STOP" not in loop:
                wait = "cat now > before; while cmp -s now before; do :; done"
                ended = await box.run(["sh", "-c", wait])
                assert ended.is_successful


async def test_a_copy_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The message says what was copied, and the limit."""
    monkeypatch.setattr(box_module, "COPY_SECONDS", 0)
    async with open_box() as box:
        with pytest.raises(SandboxLimit, match=r"\. took longer than 0 s to copy"):
            await box.copy_out(".", tmp_path / "out")


async def test_a_tree_deeper_than_the_stack_is_left_out(tmp_path: Path):
    """The runner walks and removes what it copied."""
    with scratch_directory() as directory:
        async with open_box() as box:
            await box.run(["sh", "-c", "echo 1 > answer; mkdir -p $(printf 'd/%.0s' $(seq 900))"])
            left_out = await box.copy_out(".", directory)

        assert (directory / "answer").read_text() == "1\n"
        assert len(left_out) >= 1
    assert not directory.exists()


async def test_a_flood_of_output_leaves_time_for_others(monkeypatch: pytest.MonkeyPatch):
    """It is read slowly after its first megabytes, here four of them: 16 MiB/s instead of 1 GiB/s."""
    monkeypatch.setattr(box_module, "FAST_OUTPUT_BYTES", 4 << 20)
    received = 0

    def count(chunk: bytes) -> None:
        nonlocal received
        received += len(chunk)

    async with open_box() as box:
        with suppress(SandboxLimit):
            await box.run(["sh", "-c", "yes"], timeout_seconds=0.5, on_stdout=count)

    assert received <= (4 + 8 + 4) << 20


async def test_programs_are_found_by_absolute_paths_only(monkeypatch: pytest.MonkeyPatch):
    """Else a grader would find those of the agent in its working directory."""
    monkeypatch.setenv("PATH", f"bin:.::{os.environ['PATH']}")
    async with open_box() as box:
        await box.run(["sh", "-c", "echo 'echo fake' > ls; chmod +x ls"])
        ended = await box.run(["sh", "-c", "ls; echo $PATH"])

    assert ended.stdout.decode().splitlines()[0] == "ls"


async def test_private_files_of_etc_are_not_shown():
    """Of the entries that programs need, a box sees those that every user of the machine can read."""
    from areal_actors_sandbox.bubblewrap import copy_etc

    with scratch_directory() as directory:
        source, target = directory / "source", directory / "target"
        (source / "profile.d").mkdir(parents=True)
        (source / "profile.d" / "public.sh").write_text("public")
        (source / "profile.d" / "secret.sh").write_text("secret")
        (source / "profile.d" / "secret.sh").chmod(0o600)
        (source / "gitconfig").write_text("secret")
        (source / "gitconfig").chmod(0o640)
        copy_etc(source, target, ("profile.d", "gitconfig", "missing"))

        assert sorted(path.name for path in target.rglob("*")) == ["profile.d", "public.sh"]
