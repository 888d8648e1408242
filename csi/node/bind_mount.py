"""Mounts and mount points of the kernel: look up, bind, and unmount.

Mounts are looked up in /proc/self/mountinfo, and no path that may be a mount is opened or stat'ed:
the mount's daemon may be dead, or never answer. A bind mount is made detached, given its flags and
only then attached (open_tree, mount_setattr, move_mount; Linux 5.12), so programs can never write
to a read-only bind mount. Each bind mount is also made private: a clone is a peer of its original
and of all other clones (Documentation/filesystems/sharedsubtree.rst), so a mount on top of one
pod's clone would be mounted on, and unmounted from, all pods' clones. A clone that is attached
below kubelet's shared directory gets new peers, in the containers with `HostToContainer`.

A bind mount can be idmapped, to show files of one group as another group's (for FUSE since Linux
6.12, if the daemon's answer to INIT has FUSE_ALLOW_IDMAP). Clones of it keep the mapping.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from fusefs.linux.files import closing
from fusefs.linux.libc import MNT_DETACH, UMOUNT_NOFOLLOW, system_call, umount
from fusefs.linux.mountinfo import KernelMount, kernel_mounts

# These system calls have the same numbers on every architecture but alpha.
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_SYMLINK_NOFOLLOW = 0x100
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_RDONLY = 1
_MOUNT_ATTR_NOSUID = 2
_MOUNT_ATTR_NODEV = 4
_MOUNT_ATTR_IDMAP = 0x100000
_MS_PRIVATE = 1 << 18

# The number of ids: the last 32-bit number is not an id (user_namespaces(7)).
_IDS = 2**32 - 1

# The maximum number of mounts on one path: each death of a mount may add one.
MOST_STACKED = 1000


class _MountAttributes(ctypes.Structure):
    """The struct mount_attr of mount_setattr(2)."""

    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class MountTable:
    """The mounts in this process' mount namespace at one moment."""

    def __init__(self) -> None:
        self._mounts = kernel_mounts()

    def stack(self, path: Path) -> list[KernelMount]:
        """Return the mounts on `path` itself, the topmost last."""
        return [mount for mount in self._mounts if mount.mountpoint == path]

    def top(self, path: Path) -> KernelMount | None:
        """Return the topmost mount at a path; None if there is none."""
        stack = self.stack(path)
        return stack[-1] if stack else None

    def of_device(self, device: str) -> list[KernelMount]:
        """Return all mounts of one file system."""
        return [mount for mount in self._mounts if mount.device == device]

    def fusefs_above(self, path: Path) -> KernelMount | None:
        """Return a fusefs mount above `path`, on one of its parents; None if there is none."""
        for mount in self._mounts:
            if mount.is_fusefs and mount.mountpoint in path.parents:
                return mount
        return None


def bind(
    source: Path, target: Path, *, is_read_only: bool, swapped: tuple[int, int] | None = None
) -> None:
    """Bind the mount at `source` to `target`, on top of any mount there.

    With `swapped`, files of either of the two groups at `source` have the other group at `target`,
    and a program that sets one of these groups at `target` sets the other group at `source`.

    Raises:
        OSError: a system call failed; nothing was mounted.
    """
    tree = system_call(
        _SYS_OPEN_TREE,
        _AT_FDCWD,
        os.fsencode(source),
        _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_SYMLINK_NOFOLLOW,
    )
    with closing(tree):
        flags = _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV
        flags |= _MOUNT_ATTR_RDONLY if is_read_only else 0
        _set_attributes(tree, _MountAttributes(flags, 0, _MS_PRIVATE, 0))
        if swapped is not None:
            with _swapping_namespace(*swapped) as namespace:
                _set_attributes(tree, _MountAttributes(_MOUNT_ATTR_IDMAP, 0, 0, namespace))
        system_call(
            _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH
        )


@contextlib.contextmanager
def _swapping_namespace(one: int, other: int) -> Iterator[int]:
    """Yield the descriptor of a user namespace that maps two groups to each other.

    The namespace maps all other ids to themselves. A child process makes it, because a process
    with threads cannot (unshare(2)).
    """
    first, last = sorted((one, other))
    extents = (
        (0, 0, first),
        (first, last, 1),
        (first + 1, first + 1, last - first - 1),
        (last, first, 1),
        (last + 1, last + 1, _IDS - last - 1),
    )
    groups = "\n".join(f"{inside} {outside} {n}" for inside, outside, n in extents if n)
    command = ("unshare", "--user", "sh", "-c", "echo; exec cat")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        if not child.stdout.readline():
            raise OSError(errno.ENOTSUP, child.stderr.read().decode(errors="replace").strip())
        process = Path("/proc", str(child.pid))
        (process / "uid_map").write_text(f"0 0 {_IDS}")
        (process / "gid_map").write_text(groups)
        with (process / "ns/user").open("rb") as namespace:
            yield namespace.fileno()


def pop_all(path: Path) -> None:
    """Unmount every mount on `path`; detach busy mounts (MNT_DETACH).

    Raises:
        OSError: a mount cannot be unmounted.
    """
    for _ in range(MOST_STACKED):
        if MountTable().top(path) is None:
            return
        try:
            umount(os.fspath(path), UMOUNT_NOFOLLOW)
        except OSError as error:
            if error.errno == errno.EINVAL and MountTable().top(path) is None:
                return  # unmounted by another process
            if error.errno != errno.EBUSY:
                raise
            umount(os.fspath(path), UMOUNT_NOFOLLOW | MNT_DETACH)


def make_directory(path: Path, mode: int) -> None:
    """Make a directory at `path`, which must not be a mount, unless it exists.

    Raises:
        OSError: the directory cannot be made, or `path` is no directory.
    """
    try:
        path.mkdir(mode=mode)
    except FileExistsError:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise NotADirectoryError(
                errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path)
            ) from None


def remove_directory(path: Path) -> None:
    """Remove an empty directory, if it exists.

    Raises:
        OSError: the directory is not empty, or something is mounted there.
    """
    with contextlib.suppress(FileNotFoundError):
        path.rmdir()


def _set_attributes(tree: int, attributes: _MountAttributes) -> None:
    size = ctypes.sizeof(attributes)
    system_call(_SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(attributes), size)
