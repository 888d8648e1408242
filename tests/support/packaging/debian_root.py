"""A fresh Debian in a directory, for tests of the package: dpkg and real mounts inside.

All commands share a mount and a pid namespace: with the last of them every mount and process ends.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support.sharing import drop_copies

# Where a package leaves its traces without owning files.
_OF_DPKG = ("var/lib/dpkg", "var/lib/apt", "var/cache/apt", "var/log", "var/cache/debconf")
# What the programs of the machine make on their own.
_PASSING = ("proc", "dev", "tmp", "run/lock", "var/cache/ldconfig", "var/lib/systemd")
_NETWORK = ("/etc/resolv.conf", "/etc/hosts")


def make(directory: Path, suite: str) -> None:
    """Unpack Debian's smallest root."""
    options = ("--variant=minbase", "--include=adduser,python3,util-linux,mount")
    subprocess.run(["debootstrap", *options, suite, directory], check=True, capture_output=True)


class DebianRoot:
    """Programs that run in the root, from `__enter__` to `__exit__`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._first: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def __enter__(self) -> DebianRoot:
        root = self.directory
        for name in _NETWORK:
            shutil.copy(name, root / name.lstrip("/"))
        if not (root / "etc/mtab").is_symlink():  # as Debian's installer makes it
            (root / "etc/mtab").symlink_to("/proc/self/mounts")
        script = (
            f'{drop_copies()}mount -t proc proc "{root}/proc" && mount --rbind /dev "{root}/dev"'
            f' && mount -t tmpfs tmpfs "{root}/run"'
            # As udev makes it: for every user.
            f' && mknod --mode=666 "{root}/run/fuse" c 10 229'
            f' && mount --bind "{root}/run/fuse" "{root}/dev/fuse"'
            " && echo ready && exec sleep infinity"
        )
        spaces = ("--mount", "--pid", "--fork", "--kill-child", "--propagation=private")
        self._first = subprocess.Popen(
            ["unshare", *spaces, "sh", "-c", script], stdout=subprocess.PIPE
        )
        assert self._first.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text()
        self._pid = int(children.split()[0])
        return self

    def __exit__(self, *_: object) -> None:
        self._first.kill()  # and its child with it
        self._first.wait()

    def run(self, command: str, *, fails: bool = False) -> str:
        """Run a shell command as root; returns what it printed.

        Raises:
            AssertionError: it failed, or did not where it should have.
        """
        enter = ["nsenter", f"--target={self._pid}", "--mount", "--pid"]
        done = subprocess.run(
            [*enter, "chroot", str(self.directory), "/bin/sh", "-c", command],
            env={
                "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "DEBIAN_FRONTEND": "noninteractive",
                "HOME": "/root",
                "LC_ALL": "C.UTF-8",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert (done.returncode != 0) is fails, f"{command}: {done.stdout[-3000:]}"
        return done.stdout

    def paths(self) -> set[str]:
        """All files and directories but for those of dpkg itself and of the running system."""
        left_out = tuple(f"./{name}/" for name in (*_OF_DPKG, *_PASSING))
        # Programs that change users keep the files as they were before, as /etc/passwd-.
        shown = self.run("cd / && find . -xdev ! -path './etc/*-' -printf '%p %y\\n'")
        return {line for line in shown.splitlines() if not line.startswith(left_out)}
