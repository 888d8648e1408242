"""The mounts of this machine that have a bucket's objects, by the kernel's table of mounts.

The table says what each mount of fusefs shows, also of a part that is mounted elsewhere (a
volume in a container, its subPath). Only this user's own mounts and root's are believed: any
user can mount something that says that it is a bucket.
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
    """No mount of this machine has the object. Not a `FileNotFoundError`: it may well exist."""

    def __init__(self, path: str) -> None:
        bucket = path.partition("/")[0]
        sentence = f"it is not mounted: fusefs mount s3://{bucket} DIRECTORY, or install s3fs"
        super().__init__(errno.ENODEV, sentence, path)


class BucketMount(NamedTuple):
    """A directory that shows the keys of a bucket that begin with a prefix.

    `location` is the bucket and the prefix, and ends with a slash. At and below the directories
    `covered`, which end with a slash too, the files are those of other mounts.
    """

    location: str
    directory: str
    is_read_only: bool
    covered: tuple[str, ...] = ()

    def has(self, path: str) -> bool:
        """True if `bucket/key` is this place or below it."""
        is_below = f"{path}/".startswith(self.location)
        return is_below and not f"{self.local(path)}/".startswith(self.covered)

    def local(self, path: str) -> str:
        """The file of `bucket/key`, which this place has."""
        rest = path[len(self.location) :]
        return f"{self.directory.rstrip('/')}/{rest}" if rest else self.directory


class BucketMounts:
    """All places that this process sees, as they are at each moment; for any thread."""

    def __init__(self) -> None:
        self._fd = -1  # of the kernel's table, while what is known of it holds
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Know nothing: a child shares the descriptor, and with it who has seen a change."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._lock = threading.Lock()
        self._known: list[BucketMount] = []

    def all(self) -> list[BucketMount]:
        """The places, in the order in which they were mounted."""
        with self._lock:
            if self._has_changed():
                self._known = _mounted()
            return self._known

    def find(
        self, path: str, *, for_writing: bool = False, endpoint: str | None = None
    ) -> BucketMount:
        """The place of `bucket/key`: the one with the longest prefix, a writable one if it can be.

        With an S3 `endpoint` only of mounts of that one: buckets elsewhere may have the same name.

        Raises:
            NotMountedError: there is none.
            OSError: it is read-only, and `for_writing`.
        """
        found = [place for place in self.all() if place.has(path)]
        if endpoint is not None:
            found = [place for place in found if _endpoint_of(place) == endpoint.rstrip("/")]
        if not found:
            raise NotMountedError(path)
        usable = [place for place in found if not (for_writing and place.is_read_only)]
        if not usable:
            raise OSError(errno.EROFS, "its mount is read-only", path)
        # Of equals a writable one also to read: a program sees at once what it has written.
        return max(usable, key=lambda place: (len(place.location), not place.is_read_only))

    def _has_changed(self) -> bool:
        """True if the kernel's table is another than at the last call (proc(5), mountinfo)."""
        if self._fd < 0:
            self._fd = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLPRI)
        return bool(poll.poll(0))


def _mounted() -> list[BucketMount]:
    """The mounts in the kernel's table, as far as this user may use it and nothing covers it."""
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
    """The users whose mounts are believed beside this user's own: root.

    In a container with a user namespace of its own these are shown as an unknown user's, and
    nobody in there can have made them.
    """
    if Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]:
        return {0}
    return {0, int(Path("/proc/sys/kernel/overflowuid").read_text())}


PLACES = BucketMounts()
"""Those of this process."""
