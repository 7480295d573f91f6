"""The program that is process 1 of a box: it starts commands, reaps them, watches the limits, and ends with its runner.

It runs on any Python from 3.10 with nothing but the standard library, because a container image may have no more. It is
process 1 of its PID namespace: commands in the box cannot kill it, and all of them end when it ends. It ends when the
runner closes the control socket or dies.

The runner sends frames (``REQUEST``: kind, id, length of the body; then the body) with descriptors attached, and gets
replies (``REPLY``: kind, id, number). Requests come from the runner, which is trusted; replies are plain numbers, since
the runner trusts nothing that comes out of a box.
"""

from __future__ import annotations

import marshal
import os
import resource
import select
import stat
import struct
import time

from _socket import AF_INET, AF_UNIX, CMSG_LEN, MSG_CMSG_CLOEXEC, SCM_RIGHTS, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET
from _socket import socket as Socket  # noqa: N812

# Every box pays for these imports: typing, signal and socket take 3 to 5 ms each, most of it for enum and re.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, BinaryIO
else:
    import _signal as signal

REQUEST = struct.Struct("!cIQ")
RUN, KILL, PACK, UNPACK = b"r", b"k", b"p", b"u"
REPLY = struct.Struct("!cIq")
READY, ENDED, EXCEEDED = b"R", b"E", b"L"
LIMITS = ("memory_mib", "max_processes", "cpu_seconds", "disk_mib")
"""Limits that end the box. The number of an ``EXCEEDED`` reply is an index of this tuple."""

_POLL_SECONDS = 0.1
_MAX_FILES = 4096
"""Open files of a process. Their buffers, 208 KiB for a socket, are memory of the kernel that no count includes."""
_MAX_DEPTH = 100
"""Directories in one another that a copy enters. The runner walks and removes them by recursion."""
_PAGE = resource.getpagesize()
_TICKS = os.sysconf("SC_CLK_TCK")
_MIB = 1024 * 1024
_MIN_BYTES_PER_FILE = 4096
"""A file takes at least this much of the disk limit: an empty one takes kernel memory, which tmpfs does not count."""


class _Init:
    """Process 1: one loop over the control socket, the ends of children, and the limits."""

    def __init__(self, control: Socket, limits: dict[str, Any]) -> None:
        self._control = control
        self._limits = limits
        self._ids: dict[int, int] = {}
        """Request ids by process."""
        self._packers: set[int] = set()
        """Processes that copy files out."""
        self._before = time.monotonic()
        self._has_started = False

    def serve(self) -> None:
        """Run until the runner closes the control socket, or a limit is exceeded."""
        control = self._control.fileno()
        waker, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            timeout = max(self._before + _POLL_SECONDS - time.monotonic(), 0.0) if self._has_started else None
            readable, _, _ = select.select([control, waker], [], [], timeout)
            if waker in readable:
                os.read(waker, 4096)
                self._reap()
            if control in readable and not self._serve_request():
                return
            if time.monotonic() - self._before >= _POLL_SECONDS:
                exceeded = self._exceeded()
                if exceeded is not None:
                    self._control.sendall(REPLY.pack(EXCEEDED, 0, LIMITS.index(exceeded)))
                    return
                self._before = time.monotonic()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            request = self._ids.pop(pid, None)  # None: an orphan of a command
            if pid in self._packers:
                self._packers.remove(pid)
                self._signal_all(signal.SIGCONT)
            if request is not None:
                self._control.sendall(REPLY.pack(ENDED, request, os.waitstatus_to_exitcode(status)))

    def _serve_request(self) -> bool:
        """Carry out one request. Returns ``False`` at the end of the control socket."""
        header, ancillary, _, _ = self._control.recvmsg(REQUEST.size, CMSG_LEN(16 * 4), MSG_CMSG_CLOEXEC)
        rights = b"".join(content for level, what, content in ancillary if (level, what) == (SOL_SOCKET, SCM_RIGHTS))
        files = [number for (number,) in struct.iter_unpack("i", rights)]
        if len(header) < REQUEST.size:
            return False
        kind, request, length = REQUEST.unpack(header)
        body = b""
        while len(body) < length:
            chunk = self._control.recv(min(length - len(body), _MIB))
            if not chunk:
                return False
            body += chunk
        if kind == KILL:
            for pid in [pid for pid, known in self._ids.items() if known == request]:
                try:
                    os.killpg(pid, signal.SIGKILL)
                except ProcessLookupError:
                    # The process does not lead its group yet.
                    os.kill(pid, signal.SIGKILL)
            return True
        self._start(kind, request, body, files)
        return True

    def _start(self, kind: bytes, request: int, body: bytes, files: list[int]) -> None:
        """Start a process that carries out a request."""
        if kind == PACK:
            # What the agent left running could rename files while they are copied, so that the copy fails or is of no
            # single moment, and an agent would be spared its reward.
            self._signal_all(signal.SIGSTOP)
        pid = os.fork()
        if pid == 0:
            _exec_command(kind, marshal.loads(body), files, self._limits)  # noqa: S302 - the runner wrote it
        self._ids[pid] = request
        if kind == PACK:
            self._packers.add(pid)
        self._has_started = True
        for file in files:
            os.close(file)

    def _signal_all(self, number: int) -> None:
        """Stop or continue all processes of the box, unless files are being copied out.

        Where this is not process 1, the box has no PID namespace, and -1 would be all processes of the host.
        """
        if os.getpid() == 1 and not self._packers:
            try:  # noqa: SIM105 - contextlib would be one more import at the start of a box
                os.kill(-1, number)
            except ProcessLookupError:
                pass

    # ------------------------------------------------------------------------------------------------ limits

    def _exceeded(self) -> str | None:  # noqa: C901 - each limit in turn; a second look at each process would cost more
        pids = [pid for pid in _list("") if int(pid) != os.getpid()]
        num_threads, num_pages, num_ticks = 0, 0, 0
        for number, pid in enumerate(pids):
            status = _read_status(pid)
            if not status:
                continue
            num_threads += int(status[17])
            num_ticks += sum(map(int, status[11:15]))
            if status[0] == b"Z" and int(status[17]) > 1:
                # The first thread has ended and shows no memory any more; the others share what it had.
                tasks = [(f"{pid}/task/{task}", _read_status(f"{pid}/task/{task}")) for task in _list(f"{pid}/task")]
                living = [task for task in tasks if task[1]]
                pids[number], status = max(living, key=lambda task: int(task[1][21]), default=(pid, status))
            num_pages += int(status[21])
        if max(num_threads, len(pids)) > self._limits["max_processes"]:
            return "max_processes"
        limit = self._limits["memory_mib"] * _MIB
        # Segments of System V that no process has attached are in no process's count. The last two columns are the
        # resident and the swapped bytes of each.
        segments = sum(int(word) for row in _read("/proc/sysvipc/shm").splitlines()[1:] for word in row.split()[-2:])
        # Pages that processes share count once for each of them here; hence the second, slower look.
        if num_pages * _PAGE + segments > limit:
            private, shared = (sum(column) for column in zip(*map(_proportional_bytes, pids), strict=True))
            if private + max(shared, segments) > limit:
                return "memory_mib"
        seconds = self._limits["cpu_seconds"]
        if seconds is not None:
            ended = resource.getrusage(resource.RUSAGE_CHILDREN)
            if ended.ru_utime + ended.ru_stime + num_ticks / _TICKS > seconds:
                return "cpu_seconds"
        for path in self._limits["disks"]:
            disk = os.statvfs(path)
            # Some file systems of apptainer have no size.
            written = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            counted = (disk.f_files - disk.f_ffree) * _MIN_BYTES_PER_FILE
            if max(written, counted) > self._limits["disk_mib"] * _MIB:
                return "disk_mib"
        return None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        # The process has ended, or hides its memory map.
        return b""


def _read_status(path: str) -> list[bytes]:
    """Return the words of the ``stat`` of a process or a thread, from its state on; empty if it has ended."""
    # The name of the program before them may contain anything, also brackets and spaces.
    return _read(f"/proc/{path}/stat").rpartition(b")")[2].split()


def _list(path: str) -> list[str]:
    """Return the numbers in a directory of /proc."""
    try:
        return [entry for entry in os.listdir(f"/proc/{path}") if entry.isdigit()]
    except OSError:  # the process has ended
        return []


def _proportional_bytes(pid: str) -> tuple[int, int]:
    """Return the private and the shared memory of a process, shared pages divided by their number of users.

    Files of programs are left out.
    """
    rollup = _kib_fields(_read(f"/proc/{pid}/smaps_rollup"))
    if b"Pss_Anon" in rollup:
        return rollup[b"Pss_Anon"] * 1024, rollup[b"Pss_Shmem"] * 1024
    status = _kib_fields(_read(f"/proc/{pid}/status"))
    return status.get(b"RssAnon", 0) * 1024, status.get(b"RssShmem", 0) * 1024


def _kib_fields(text: bytes) -> dict[bytes, int]:
    fields = {}
    for line in text.splitlines():
        name, colon, value = line.partition(b":")
        if colon and value.endswith(b" kB"):
            fields[name] = int(value[:-3])
    return fields


# -------------------------------------------------------------------------------------------------- commands


def _exec_command(kind: bytes, request: dict[str, Any], files: list[int], limits: dict[str, Any]) -> None:
    """Turn the forked process into the command. Never returns."""
    status = 126
    try:
        os.setsid()
        for target, file in enumerate(files):
            os.dup2(file, target)
        os.closerange(3, 1024)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if kind == PACK:
            with open(1, "wb", closefd=False) as stream:
                pack(request["path"], stream)
            os._exit(0)
        if kind == UNPACK:
            with open(0, "rb", closefd=False) as stream:
                unpack(stream, request["path"], keeps_links=True)
            os._exit(0)
        os.makedirs(request["directory"], exist_ok=True)
        os.chdir(request["directory"])
        _limit_process(limits)
        try:
            os.execvpe(request["command"][0], request["command"], request["environment"])  # noqa: S606
        except FileNotFoundError:
            status = 127
            raise
    except BaseException as error:  # noqa: BLE001 - the parent gets an exit status, as from a shell
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(status)


def _limit_process(limits: dict[str, Any]) -> None:
    """Set the limits that the kernel enforces for each process."""
    memory, disk = limits["memory_mib"] * _MIB, limits["disk_mib"] * _MIB
    # Not RLIMIT_AS: node, Go and the JVM reserve far more addresses than they use.
    _lower(resource.RLIMIT_DATA, memory)
    _lower(resource.RLIMIT_FSIZE, disk)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, _MAX_FILES)
    if limits["cpu_seconds"] is not None:
        _lower(resource.RLIMIT_CPU, int(limits["cpu_seconds"]) + 1)
    if limits["counts_processes"]:
        _lower(resource.RLIMIT_NPROC, limits["max_processes"])
    if limits["cpus"] is not None:
        allowed = sorted(os.sched_getaffinity(0))
        first = limits["first_cpu"] % len(allowed)
        os.sched_setaffinity(0, (allowed[first:] + allowed[:first])[: limits["cpus"]])
    try:
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            # If the machine runs out of memory, the kernel ends boxes before the runner.
            file.write(b"1000")
    except OSError:
        pass


def _lower(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


# -------------------------------------------------------------------------------------------------- archives


def pack(path: str, stream: BinaryIO) -> None:
    """Write the file or the tree at ``path`` to ``stream`` as a tar archive, relative to it.

    Devices, sockets, files that cannot be read, and those that disappear meanwhile are left out.
    """
    import tarfile

    if not os.path.lexists(path):
        raise FileNotFoundError(f"there is no {path}")
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:

        def add(source: str, name: str) -> None:
            # One more than is unpacked, so that the reader names it as left out.
            if name.count("/") > _MAX_DEPTH + 1:
                return
            status = os.lstat(source)
            member = tarfile.TarInfo(name)
            member.mode, member.mtime = stat.S_IMODE(status.st_mode), status.st_mtime
            if stat.S_ISLNK(status.st_mode):
                member.type, member.linkname = tarfile.SYMTYPE, os.readlink(source)
                archive.addfile(member)
            elif stat.S_ISREG(status.st_mode) and os.access(source, os.R_OK):
                with open(source, "rb") as content:
                    member.size = os.fstat(content.fileno()).st_size
                    archive.addfile(member, content)
            elif stat.S_ISDIR(status.st_mode) and os.access(source, os.R_OK | os.X_OK):
                member.type = tarfile.DIRTYPE
                archive.addfile(member)
                for entry in sorted(os.listdir(source)):
                    try:
                        add(os.path.join(source, entry), os.path.join(name, entry))
                    except (FileNotFoundError, NotADirectoryError):
                        # A process that still runs has removed it.
                        continue

        add(path, "." if os.path.isdir(path) else os.path.basename(path))


def unpack(
    stream: BinaryIO, target: str, *, keeps_links: bool = False, max_bytes: int | None = None
) -> tuple[str, ...]:
    """Write the files of a tar archive below ``target``, which is created. Returns the names that were left out.

    The archive is not trusted: names that lead out of ``target`` or that are deeper than 100 directories, devices, and
    (unless ``keeps_links``) symbolic links that lead out of it are left out. Symbolic links are made last, so that no
    file is written through one.

    Raises:
        OverflowError: the files have more than ``max_bytes``.
    """
    import tarfile

    refused: list[str] = []
    links: list[tuple[str, str]] = []
    written = 0
    os.makedirs(target, exist_ok=True)
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            parts = [part for part in member.name.split("/") if part not in ("", ".")]
            if (
                ".." in parts
                or len(parts) > _MAX_DEPTH
                or member.name.startswith("/")
                or not (member.isfile() or member.isdir() or member.issym())
            ):
                refused.append(member.name)
                continue
            path = os.path.join(target, *parts)
            written += max(member.size, _MIN_BYTES_PER_FILE)
            if max_bytes is not None and written > max_bytes:
                raise OverflowError(f"the files have more than {max_bytes // _MIB} MiB")
            if member.issym():
                if keeps_links or _stays_inside(member.linkname, depth=len(parts) - 1):
                    links.append((member.linkname, path))
                else:
                    refused.append(member.name)
                continue
            if member.isdir():
                os.makedirs(path, exist_ok=True)
                continue
            os.makedirs(os.path.dirname(path), exist_ok=True)
            content = archive.extractfile(member)
            with open(path, "wb") as file:
                while content is not None and (chunk := content.read(_MIB)):
                    file.write(chunk)
            os.chmod(path, member.mode & 0o777 | 0o600)  # no setuid
    # tarfile stops at the first block of zeros, which ends a record for one size of 20. A writer of the last record is
    # killed by SIGPIPE if its pipe is closed by then, and the copy fails.
    stream.read(tarfile.RECORDSIZE)
    return (*refused, *_make_links(links, target))


def _make_links(links: list[tuple[str, str]], root: str) -> list[str]:
    """Make symbolic links, given as targets and paths, below ``root``. Returns the names that were left out."""
    refused = []
    real_root = os.path.realpath(root)
    for link, path in links:
        # Below another link, its place is not as deep as its name says, and ``..`` would lead out.
        parent = os.path.dirname(path)
        if os.path.realpath(parent) != os.path.normpath(os.path.join(real_root, os.path.relpath(parent, root))):
            refused.append(os.path.relpath(path, root))
            continue
        if os.path.lexists(path) and not os.path.isdir(path):
            os.unlink(path)
        os.makedirs(parent, exist_ok=True)
        os.symlink(link, path)
    return refused


def _stays_inside(link: str, *, depth: int) -> bool:
    """Return whether a symbolic link, ``depth`` directories below the root of its tree, cannot lead out of the tree.

    ``..`` is accepted only in front: the link's directory is a real one, but after a name, which may be another link,
    ``..`` may lead anywhere.
    """
    parts = [part for part in link.split("/") if part not in ("", ".")]
    num_up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return not link.startswith("/") and num_up <= depth and ".." not in parts[num_up:]


# ----------------------------------------------------------------------------------------------------- start


def main(channel: int | str, settings: dict[str, Any]) -> None:
    """Serve on the control socket: an inherited descriptor, or the path of a socket to connect to."""
    # Forbid commands in the box to trace this process or to read its files and environment (PR_SET_DUMPABLE).
    try:
        # ctypes itself takes 8 ms to import.
        import _ctypes

        itself: Any = None
        prctl = _ctypes.dlsym(_ctypes.dlopen(itself, 0), "prctl")
        _ctypes.call_function(prctl, (4, 0, 0, 0, 0))
    except (ImportError, AttributeError, OSError):
        # Then commands can disturb their own box, and no other.
        pass
    if isinstance(channel, str):
        control = Socket(AF_UNIX, SOCK_STREAM)
        control.connect(channel)
    else:
        # A low number, which is not inherited: those of a runner with many connections are too high for ``select``.
        control = Socket(fileno=os.dup(channel))
    inherited = [int(name) for name in os.listdir("/proc/self/fd")]
    for number in inherited:
        if number not in (0, 1, 2, control.fileno()):
            # Unlike ``close``, this raises no error for the descriptor of the listing.
            os.closerange(number, number + 1)
    files: list[int] = []
    listener = Socket(AF_INET, SOCK_STREAM)
    if settings["port"] is not None:
        # The runner accepts on this socket from outside: a socket stays in the network namespace that created it.
        listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", settings["port"]))
        listener.listen(128)
        files = [listener.fileno()]
    ancillary = [(SOL_SOCKET, SCM_RIGHTS, struct.pack(f"{len(files)}i", *files))] if files else []
    control.sendmsg([REPLY.pack(READY, 0, os.getpid())], ancillary)
    listener.close()
    _Init(control, settings).serve()
