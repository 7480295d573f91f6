"""A real Slurm cluster on this machine, for as long as a block lasts: ``slurm-local`` beside this file.

It needs root and Slurm's Debian packages. ``why_not`` says what is missing, for the reason of a skip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from attrs import frozen

from areal_actors.schedulers.slurm import clean_environment

__all__ = ["INSTALL", "ROOT", "Cluster", "open_cluster", "why_no_namespaces", "why_not"]

ROOT = Path(__file__).parents[3]
INSTALL = "apt-get install --no-install-recommends " + " ".join(
    Path(__file__).with_name("packages.txt").read_text(encoding="utf-8").split()
)
_SCRIPT = Path(__file__).with_name("slurm-local")
_SECONDS = 120


def why_not() -> str:
    """Why no cluster can be started here; empty if one can."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name, path=path) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)}): {INSTALL}"
    return "" if os.geteuid() == 0 else "a cluster of one's own needs root"


def why_no_namespaces() -> str:
    """Why nodes cannot have a network of their own; empty if they can."""
    command = ["unshare", "--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--mount-proc", "true"]
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return f"iproute2 or util-linux is not installed: {INSTALL}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    return "" if done.returncode == 0 else f"namespaces are not allowed here: {done.stderr.strip()}"


@frozen(kw_only=True)
class Cluster:
    """One that runs. ``nodes`` are called ``<prefix>01`` and so on."""

    directory: Path
    prefix: str
    has_namespaces: bool

    def node(self, number: int) -> str:
        """Name of a node, from 1."""
        return f"{self.prefix}{number:02}"

    @property
    def environment(self) -> dict[str, str]:
        """What finds this cluster and this package."""
        ours = {"SLURM_CONF": str(self.directory / "etc" / "slurm.conf"), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        return clean_environment(os.environ) | ours

    @property
    def address(self) -> str:
        """Where controller listens so that nodes reach it: this machine, seen from its nodes."""
        if not self.has_namespaces:
            return "tcp://127.0.0.1:0"
        conf = (self.directory / "etc" / "slurm.conf").read_text()
        host = next(line for line in conf.splitlines() if line.startswith("SlurmctldHost="))
        return f"tcp://{host.partition('(')[2].rstrip(')')}:0"

    def act(self, action: str, *arguments: str) -> None:
        """One action of ``slurm-local``, such as ``crash-node``."""
        run = [str(_SCRIPT), action, "-d", str(self.directory), *arguments]
        done = subprocess.run(run, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(run)}: {done.stdout}{done.stderr}")

    def run(self, *command: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=True, env=self.environment
        )
        return done.stdout

    def queue(self) -> list[str]:
        """``name state`` of every job that has not ended."""
        return self.run("squeue", "-h", "-o", "%j %T").splitlines()

    def mend(self) -> None:
        """Start the daemons that have ended, and have every node take work again."""
        self.act("start-ctld")
        for line in self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t").splitlines():
            node, state = line.split()
            if state.endswith("*") or state.startswith("down"):
                self.act("start-node", node)
            if state.startswith(("drain", "drng", "down")):
                with suppress(subprocess.CalledProcessError):  # refused where it has come back by itself meanwhile
                    self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.act("wait")

    def processes(self, words: str) -> list[str]:
        """Command lines of living processes with these words in their environment."""
        return [line for line in map(_command_line, _find_processes(words)) if line]


def _find_processes(words: str) -> Iterator[Path]:
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if words.encode() in (directory / "environ").read_bytes():
                yield directory
        except OSError:
            continue


def _command_line(directory: Path) -> str:
    try:
        return (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


@contextmanager
def open_cluster(
    directory: Path,
    *,
    prefix: str,
    num_nodes: int,
    options: tuple[str, ...] = (),
    extra: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """A cluster in ``directory``; nothing is left of it. ``extra`` are further lines of slurm.conf."""
    (directory / "etc").mkdir(parents=True)
    lines = [f"{name}={value}" for name, value in (extra or {}).items()]
    (directory / "etc" / "extra.conf").write_text("\n".join(lines) + "\n")
    cluster = Cluster(directory=directory, prefix=prefix, has_namespaces="--netns" in options)
    with _purged_if_killed(directory):
        try:
            cluster.act("start", "--nodes", str(num_nodes), "--prefix", prefix, *options)
            yield cluster
        finally:
            cluster.act("purge")


@contextmanager
def _purged_if_killed(directory: Path) -> Iterator[None]:
    """A shell that sees to the cluster where we are killed: it waits for a word of ours, or for our end."""
    purge = 'read -r word || { "$1" purge -d "$2"; rm -rf "$2"; }'
    shell = ["sh", "-c", purge, "sh", str(_SCRIPT), str(directory)]
    with subprocess.Popen(
        shell, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as keeper:
        try:
            yield
        finally:
            keeper.communicate(b"done\n")
