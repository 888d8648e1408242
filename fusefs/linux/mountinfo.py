"""The kernel's table of mounts: /proc/self/mountinfo.

Reading the table accesses no mount; a stat of a mountpoint whose daemon hangs would
hang as well. The keeper imports this module, so it imports nothing large.
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
    """One line of mountinfo: `device` is "major:minor", `number` and `parent` are mount ids.

    `options` are the file system's, `flags` those of this mount of it; `root` is the directory of
    the file system that is mounted here. See proc_pid_mountinfo(5).
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
        """True if this mount refuses changes; another mount of the file system may allow them."""
        return "ro" in self.flags.split(",")

    @property
    def is_idmapped(self) -> bool:
        """True if this mount shows other owners than the file system has (mount_setattr(2))."""
        return "idmapped" in self.flags.split(",")

    @property
    def connection(self) -> int:
        """The number of the FUSE connection, which is the device's minor number."""
        return int(self.device.partition(":")[2])

    @property
    def owner(self) -> int | None:
        """The uid of the user who mounted the file system; None if its options do not show it."""
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
    """Return the topmost mount at exactly `mountpoint`, or None; autofs mounts do not count."""
    found = [mount for mount in _mounts_at(mountpoint) if mount.filesystem != AUTOMOUNT_TYPE]
    return found[-1] if found else None


def has_automount(mountpoint: Path) -> bool:
    """True if an automounter waits for a mount at exactly `mountpoint` (x-systemd.automount)."""
    return any(mount.filesystem == AUTOMOUNT_TYPE for mount in _mounts_at(mountpoint))


def _mounts_at(mountpoint: Path | str) -> list[KernelMount]:
    return [mount for mount in kernel_mounts() if mount.path == str(mountpoint)]


def mount_above(path: Path) -> KernelMount | None:
    """Return the mount that holds `path` (absolute, no symbolic links); the path need not exist."""
    return reached(str(path), kernel_mounts())


def reached(path: str, mounts: Sequence[KernelMount]) -> KernelMount | None:
    """Return the mount of the table `mounts` that holds `path`, or None.

    At each mount the kernel follows the first child mount on the path. The order of the lines
    does not show this: a mount that was moved, or made before it was attached, may stand before
    its parent.
    """
    above = [mount for mount in mounts if f"{path}/".startswith(f"{mount.path.rstrip('/')}/")]
    numbers = {mount.number for mount in mounts}
    # The parent of the process's root mount is not in the table, or is the root mount itself.
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
    """True if the FUSE connection has a mount in this process's mount namespace."""
    return any(
        mount.device == f"0:{connection}" and mount.filesystem.startswith("fuse")
        for mount in kernel_mounts()
    )
