"""The mounts of this machine that have a bucket's objects, from the kernel's table of mounts.

The table has the source of each fusefs mount, also if only a part of the mount is mounted elsewhere
(a volume in a container, its subPath). Only this user's own mounts and root's are trusted: any user
can mount something that claims to be a bucket.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from pathlib import Path
from typing import NamedTuple

from fusefs.linux import mountinfo

_SCHEME = "s3://"


class NotMountedError(OSError):
    """No mount of this machine has the path; not a `FileNotFoundError`, as the object may exist."""

    def __init__(self, path: str) -> None:
        bucket = path.partition("/")[0]
        sentence = f"it is not mounted: fusefs mount s3://{bucket} DIRECTORY, or install s3fs"
        super().__init__(errno.ENODEV, sentence, path)


class BucketMount(NamedTuple):
    """A directory that shows the keys of a bucket that begin with a prefix.

    `location` is the bucket and the prefix, and ends with a slash. Files at and below the
    directories `covered`, which end with a slash too, belong to other mounts.
    """

    location: str
    directory: str
    is_read_only: bool
    covered: tuple[str, ...] = ()

    def has(self, path: str) -> bool:
        """True if `bucket/key` is at or below `location`, and not covered by another mount."""
        is_below = f"{path}/".startswith(self.location)
        return is_below and not f"{self.local(path)}/".startswith(self.covered)

    def local(self, path: str) -> str:
        """Return the local file name of `bucket/key`, which must be in this mount."""
        rest = path[len(self.location) :]
        return f"{self.directory.rstrip('/')}/{rest}" if rest else self.directory


class BucketMounts:
    """All bucket mounts that this process sees, always up to date; for any thread."""

    def __init__(self) -> None:
        self._fd = -1  # the kernel's table, open since it was last read
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Forget the mounts, at first and in each forked child.

        The kernel reports a change once per open of its table, and a fork shares the open table.
        """
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._lock = threading.Lock()
        self._known: list[BucketMount] | None = None

    def all(self) -> list[BucketMount]:
        """Return the bucket mounts, in the order in which they were mounted."""
        with self._lock:
            if self._has_changed():
                self._known = None  # until the table was read, as the kernel reports a change once
            if self._known is None:
                self._known = _mounted()
            return self._known

    def find(
        self, path: str, *, for_writing: bool = False, endpoint: str | None = None
    ) -> BucketMount:
        """Return the mount of `bucket/key` with the longest prefix, a writable one if possible.

        With an S3 `endpoint`, only its mounts count: other stores' buckets may have the same name.

        Raises:
            NotMountedError: no mount has the path.
            OSError: `for_writing` is set, and the mount is read-only.
        """
        found = [place for place in self.all() if place.has(path)]
        if endpoint is not None:
            found = [place for place in found if _endpoint_of(place) == endpoint.rstrip("/")]
        if not found:
            raise NotMountedError(path)
        usable = [place for place in found if not (for_writing and place.is_read_only)]
        if not usable:
            raise OSError(errno.EROFS, "its mount is read-only", path)
        # Of equal mounts a writable one is used even to read: a program sees at once what it wrote.
        return max(usable, key=lambda place: (len(place.location), not place.is_read_only))

    def _has_changed(self) -> bool:
        """True if the kernel's table has changed since the last call (proc(5), mountinfo)."""
        if self._fd < 0:
            self._fd = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLPRI)
        return bool(poll.poll(0))


def _mounted() -> list[BucketMount]:
    """Return the mounts in the kernel's table that this user may use and that nothing covers."""
    table = mountinfo.kernel_mounts()
    trusted = _trusted_owners()
    places = []
    for mount in table:
        is_own = mount.owner == os.geteuid()
        is_usable = is_own or ("allow_other" in mount.options.split(",") and mount.owner in trusted)
        if not (mount.is_fusefs and is_usable and mount.source.startswith(_SCHEME)):
            continue
        if mountinfo.reached(mount.path, table) is not mount:
            continue
        source = mount.source.removeprefix(_SCHEME).rstrip("/")
        location = f"{source}/{mount.root.strip('/')}".rstrip("/") + "/"
        is_read_only = mount.is_read_only or "ro" in mount.options.split(",")
        covered = tuple(f"{other.path}/" for other in table if other.parent == mount.number)
        places.append(BucketMount(location, mount.path, is_read_only, covered))
    return places


def _endpoint_of(place: BucketMount) -> str:
    try:
        return os.getxattr(place.directory, "user.s3.endpoint").decode().rstrip("/")
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        return ""


def _trusted_owners() -> set[int]:
    """Return the uids whose mounts are trusted beside this user's own: root's.

    In a container with its own user namespace, root's mounts are shown as an unknown user's, and
    nobody inside can have made such a mount.
    """
    if Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]:
        return {0}
    return {0, int(Path("/proc/sys/kernel/overflowuid").read_text())}


# The mounts that this process sees.
PLACES = BucketMounts()
