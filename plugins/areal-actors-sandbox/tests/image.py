"""An image for the tests of containers, from this machine's own files: ``python image.py DIRECTORY``.

It needs no registry and no network. DIRECTORY becomes the root of a file system with ``sh``, ``python3``, the programs
of coreutils, and their libraries (56 MB). docker and podman import it as ``areal-sandbox-test``, where they run;
apptainer takes the directory itself.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryFile

__all__ = ["NAME", "create_root", "import_root"]

NAME = "areal-sandbox-test"
_PYTHON = Path("/usr/bin/python3")
_PACKAGES = ("coreutils", "dash", "bash", "grep", "sed", "util-linux", "procps")
_UNUSED = shutil.ignore_patterns("__pycache__", "test", "idlelib", "tkinter", "lib2to3", "config-*", "dist-packages")


def create_root(root: Path) -> None:
    """Create the file system below ``root``, which does not exist yet."""
    for directory in ("usr/bin", "usr/lib64", "etc", "tmp", "proc", "sys", "dev", "run", "root", "var"):
        (root / directory).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "usr/sbin").symlink_to("bin")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    owned = subprocess.run(["dpkg", "--listfiles", *_PACKAGES], check=True, capture_output=True, text=True).stdout
    programs = [Path(line) for line in owned.splitlines() if re.fullmatch(r"(/usr)?/bin/[^/]+", line)]
    for program in (*programs, _PYTHON):
        shutil.copy(program, root / "usr/bin" / program.name)
    library = subprocess.run(
        [_PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    shutil.copytree(library, root / library[1:], ignore=_UNUSED, symlinks=True)
    binaries = [*(root / "usr/bin").iterdir(), *(root / library[1:]).rglob("*.so")]
    for binary in binaries:
        found = subprocess.run(["ldd", binary], check=False, capture_output=True, text=True).stdout  # scripts have none
        for needed in re.findall(r"(/\S+) \(0x", found):
            copy = root / "usr" / needed.removeprefix("/usr").lstrip("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists():
                shutil.copy(needed, copy)


def import_root(program: str, root: Path) -> bool:
    """Import the file system as an image of docker or podman. Returns whether the program is here and runs."""
    if shutil.which(program) is None:
        return False
    with TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(root, ".")
        file.seek(0)
        return subprocess.run([program, "import", "-", NAME], check=False, stdin=file).returncode == 0


if __name__ == "__main__":
    create_root(Path(sys.argv[1]))
    for name in ("docker", "podman"):
        sys.stdout.write(f"{name}: {'imported' if import_root(name, Path(sys.argv[1])) else 'does not run here'}\n")
