"""Backing files: what the kernel reads by itself.

`FUSE_DEV_IOC_BACKING_OPEN` registers an open cache file under an id, and an
OPEN reply that names the id makes the kernel read that file directly: reads,
mmaps and splices of the handle never come here, and run at the disk's speed.
The kernel keeps the file; our descriptor may be closed.

An id belongs to a cache file, and all inodes and handles of that version share
it. Registering costs an open and an ioctl, so ids are kept after the last
close, the least recently used going first when there are too many. An id is
only given back while nobody has the file open: the kernel would refuse every
further open of such an inode.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import tempfile
from collections import OrderedDict
from pathlib import Path

from fusefs.cache.files import CacheFile
from fusefs.kernel import wire

logger = logging.getLogger("fusefs.passthrough")

# Each keeps a file open in the kernel (about 1 KiB), outside of RLIMIT_NOFILE.
MOST_IDS = 16384


class NoPassthrough:
    """For sessions and kernels without it; `why` is for `status`."""

    is_on = False

    def __init__(self, why: str) -> None:
        self.why = why

    def find(self, file: CacheFile) -> int:
        return 0

    def register(self, file: CacheFile) -> int:
        return 0

    def drop(self, file: CacheFile) -> None:
        pass


class Passthrough:
    """The backing ids of one mount. Belongs to the event loop; nothing here waits."""

    def __init__(self, device: int, most: int = MOST_IDS) -> None:
        self._device = device
        self._most = most
        self.is_on = False
        self.why = "not negotiated yet"
        # By the name of the cache file, least recently used first.
        self._ids: OrderedDict[str, tuple[int, CacheFile]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def turn_on(self, is_negotiated: bool, cache: Path) -> None:
        """Try whether the kernel takes files of the cache's directory. Blocks shortly."""
        if not is_negotiated:
            self.why = "this kernel has no FUSE passthrough (Linux 6.9 or later has)"
            return
        try:
            with tempfile.TemporaryFile(dir=cache) as probe:
                self._close(self._open(probe.fileno()))
        except OSError as error:
            self.why = _explain(error)
            return
        self.is_on = True
        self.why = "the kernel reads cached files itself"

    def find(self, file: CacheFile) -> int:
        """The id under which a file is registered, or 0."""
        found = self._ids.get(file.name)
        if found is None or found[1] is not file:
            return 0
        self._ids.move_to_end(file.name)
        return found[0]

    def register(self, file: CacheFile) -> int:
        """Register a complete file whose descriptor is open; 0 if the kernel refuses."""
        known = self.find(file)
        if known or not self.is_on:
            return known
        try:
            backing_id = self._open(file.fd)
        except OSError as error:
            logger.warning("the kernel refused a file for passthrough: %s", _explain(error))
            return 0
        self._ids[file.name] = (backing_id, file)
        self._shrink()
        return backing_id

    def drop(self, file: CacheFile) -> None:
        """Give a file's id back; nobody has the file open."""
        found = self._ids.pop(file.name, None)
        if found is not None:
            self._close(found[0])

    def close(self) -> None:
        """Give all ids back, at the end of the mount."""
        for backing_id, _ in self._ids.values():
            self._close(backing_id)
        self._ids.clear()

    def _shrink(self) -> None:
        while len(self._ids) > self._most:
            unused = next((file for _, file in self._ids.values() if not file.pins), None)
            if unused is None:
                return
            self.drop(unused)

    def _open(self, fd: int) -> int:
        # A mutable buffer: with an immutable one Python loses the return value.
        request = bytearray(wire.BACKING_MAP.pack(fd, 0, 0))
        backing_id: int = fcntl.ioctl(self._device, wire.DEV_IOC_BACKING_OPEN, request)
        return backing_id

    def _close(self, backing_id: int) -> None:
        try:
            fcntl.ioctl(self._device, wire.DEV_IOC_BACKING_CLOSE, struct.pack("=I", backing_id))
        except OSError as error:
            if error.errno != errno.ENODEV:
                logger.warning("backing id %d: %s", backing_id, error.strerror)


def _explain(error: OSError) -> str:
    if error.errno == errno.EPERM:
        return "registering files needs CAP_SYS_ADMIN in the initial user namespace"
    if error.errno == errno.ELOOP:
        return "the cache is on a file system that is itself stacked"
    if error.errno in (errno.ENOTTY, errno.EINVAL):
        return "this kernel has no FUSE passthrough (Linux 6.9 or later has)"
    return os.strerror(error.errno or errno.EIO)
