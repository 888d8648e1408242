"""Mounting: the options of a mount, and its /dev/fuse descriptor.

For root, the keeper opens /dev/fuse and calls mount(2) (keeper/policy.py). For other users,
fusermount3, the setuid helper of libfuse, does the same and sends the descriptor back over a
socket, whose number is in the environment variable _FUSE_COMMFD.

No function here accesses the mount itself: a stat of it would wait for an answer
of this very process.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fusefs.linux import fuse_connection, libc, sockets
from fusefs.linux.capabilities import CAP_SYS_ADMIN
from fusefs.linux.mountinfo import FILESYSTEM_TYPE, find_mount, mount_above

# The kernel's read-ahead for sequential readers; a new mount has 128. With 4096
# and more, a first read was a fifth slower, because requests wait for each other.
READ_AHEAD_KIB = 1024
MAX_READ = 1 << 20


class MountError(Exception):
    """The mount could not be made; the message is for the user."""


@dataclass(frozen=True, slots=True)
class MountRequest:
    """The description of a mount to make; mount(8) shows `source` as its device."""

    source: str
    mountpoint: Path
    allow_other: bool
    read_only: bool = True
    noexec: bool = False


def may_mount() -> bool:
    """True if this process has CAP_SYS_ADMIN: it may mount and register passthrough files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_ADMIN & 1)
    return False


def mount_arguments(request: MountRequest) -> tuple[int, str]:
    """Return the flags and the data for mount(2); the caller puts "fd=N," before the data."""
    options = [
        "rootmode=40000",
        f"user_id={os.geteuid()}",
        f"group_id={os.getegid()}",
        "default_permissions",
        f"max_read={MAX_READ}",
    ]
    if request.allow_other:
        options.append("allow_other")
    flags = libc.MS_NOSUID | libc.MS_NODEV | (libc.MS_RDONLY if request.read_only else 0)
    return flags | (libc.MS_NOEXEC if request.noexec else 0), ",".join(options)


def mount_by_helper(request: MountRequest) -> int:
    """Mount as an ordinary user; return the non-blocking /dev/fuse descriptor. Blocks shortly.

    Programs that access the mountpoint wait until a process answers on the descriptor.

    Raises:
        MountError: the message is one sentence with the reason.
    """
    helper = shutil.which("fusermount3")
    if helper is None:
        raise MountError("an ordinary user's mount needs fusermount3: install the package fuse3")
    given = ["nosuid", "nodev", "default_permissions", f"max_read={MAX_READ}"]
    options = ",".join([*given, *helper_options(request, request.source)])
    ours, its = socket.socketpair()
    with ours, its:
        result = subprocess.run(
            [helper, "-o", options, "--", os.fspath(request.mountpoint)],
            env={**os.environ, "_FUSE_COMMFD": str(its.fileno())},
            pass_fds=[its.fileno()],
            capture_output=True,
            text=True,
            check=False,
        )
        its.close()
        fds = sockets.receive(ours, 1, 1)[1] if result.returncode == 0 else []
    if not fds:
        why = result.stderr.strip().splitlines()
        raise MountError(why[-1] if why else "fusermount3 failed without a message")
    os.set_blocking(fds[0], False)
    return fds[0]


def helper_options(request: MountRequest, source: str) -> list[str]:
    """Return the options for fusermount3; mount(8) then shows `source` as the device."""
    source = source.replace("\\", "\\\\").replace(",", "\\,")
    options = [f"fsname={source}", "subtype=" + FILESYSTEM_TYPE.removeprefix("fuse.")]
    if request.read_only:
        options.append("ro")
    if request.allow_other:
        options.append("allow_other")
    if request.noexec:
        options.append("noexec")
    return options


def raise_read_ahead(mountpoint: Path) -> bool:
    """Set a mount's kernel read-ahead to READ_AHEAD_KIB; False without mount or permission."""
    mount = find_mount(mountpoint)
    return mount is not None and fuse_connection.raise_read_ahead(mount.connection, READ_AHEAD_KIB)


def stack_depth(cache: Path) -> int:
    """Return the FUSE stack depth for backing files in `cache`: 2 on overlayfs, else 1."""
    holding = mount_above(cache.resolve())
    return 2 if holding is not None and holding.filesystem == "overlay" else 1
