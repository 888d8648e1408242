"""The kernel's table of mounts: /proc/self/mountinfo.

Reading it touches no mount: a stat of a mountpoint whose daemon hangs would hang
as well. The keeper reads it too, so this module imports nothing that is large.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False  # typing itself is not imported: it is large
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FILESYSTEM_TYPE = "fuse.fusefs"
AUTOMOUNT_TYPE = "autofs"


class KernelMount:
    """One line of mountinfo. `device` is "major:minor", `number` and `parent` are ids of mounts.

    `options` are the file system's, `flags` those of this mount of it; `root` is the directory
    of the file system that is mounted here. See proc_pid_mountinfo(5).
    """

    def __init__(self, line: str) -> None:
        before, _, after = line.partition(" - ")
        number, parent, self.device, root, path, self.flags = before.split(" ")[:6]
        self.filesystem, source, self.options = after.split(" ", 2)
        self.number, self.parent = int(number), int(parent)
        self.root, self.path, self.source = _unescape(root), _unescape(path), _unescape(source)

    @property
    def mountpoint(self) -> Path:
        from pathlib import Path

        return Path(self.path)

    @property
    def is_fuse(self) -> bool:
        return self.filesystem == "fuse" or self.filesystem.startswith("fuse.")

    @property
    def is_fusefs(self) -> bool:
        return self.filesystem == FILESYSTEM_TYPE

    @property
    def is_read_only(self) -> bool:
        """True if this mount of it refuses changes; another mount of it may not."""
        return "ro" in self.flags.split(",")

    @property
    def connection(self) -> int:
        """The number of the FUSE connection: the device's minor."""
        return int(self.device.partition(":")[2])

    @property
    def owner(self) -> int | None:
        """The uid that mounted it, if the file system shows that."""
        match = re.search(r"(?:^|,)user_id=(\d+)", self.options)
        return int(match[1]) if match else None


def parse(text: str) -> list[KernelMount]:
    return [KernelMount(line) for line in text.split("\n") if " - " in line]


def _unescape(text: str) -> str:
    """Undo the kernel's octal escapes of blank, tab, newline, # and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def kernel_mounts() -> list[KernelMount]:
    with open("/proc/self/mountinfo", errors="surrogateescape", newline="\n") as file:
        return parse(file.read())


def find_mount(mountpoint: Path | str) -> KernelMount | None:
    """The topmost mount at exactly `mountpoint`; an automounter's own is none."""
    found = [mount for mount in _mounts_at(mountpoint) if mount.filesystem != AUTOMOUNT_TYPE]
    return found[-1] if found else None


def has_automount(mountpoint: Path) -> bool:
    """True if an automounter waits for a mount at exactly `mountpoint` (x-systemd.automount)."""
    return any(mount.filesystem == AUTOMOUNT_TYPE for mount in _mounts_at(mountpoint))


def _mounts_at(mountpoint: Path | str) -> list[KernelMount]:
    return [mount for mount in kernel_mounts() if mount.path == str(mountpoint)]


def mount_above(path: Path) -> KernelMount | None:
    """The mount that `path` is on: absolute and without symbolic links. It need not exist."""
    return reached(str(path), kernel_mounts())


def reached(path: str, mounts: Sequence[KernelMount]) -> KernelMount | None:
    """The mount of a table on which a program that opens `path` arrives.

    The kernel goes from each mount to the one that is mounted on it first on the way. The order
    of the lines does not show that: a mount that was moved, or made before it was attached,
    stands before the one that it is mounted on.
    """
    above = [mount for mount in mounts if f"{path}/".startswith(f"{mount.path.rstrip('/')}/")]
    numbers = {mount.number for mount in mounts}
    # What the process' root is mounted on is not in its table, or is the root itself.
    nexts = [mount for mount in above if mount.parent not in numbers - {mount.number}]
    found = None
    while nexts:
        found = min(nexts, key=lambda mount: len(mount.path))
        nexts = [mount for mount in above if mount.parent == found.number != mount.number]
    return found


def is_mountpoint(path: Path) -> bool:
    return find_mount(path) is not None


def connection_at(path: str) -> int | None:
    mount = find_mount(path)
    return mount.connection if mount is not None and mount.is_fuse else None


def is_connection_mounted(connection: int) -> bool:
    """True if the FUSE connection has a mount in this namespace."""
    return any(
        mount.device == f"0:{connection}" and mount.filesystem.startswith("fuse")
        for mount in kernel_mounts()
    )
