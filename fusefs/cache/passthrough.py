"""Backing files: cache files that the kernel reads without asking the daemon.

A cache file is registered with the kernel under an id. An OPEN reply that names the id makes the
kernel read that file directly, so reads, mmaps and splices of the handle never reach the daemon.
The kernel holds the file open, so the daemon may close its descriptor. The keeper makes the call,
which needs privilege, and remembers the ids for the next daemon.

All inodes and handles of a cache file's version share its id. Ids stay after the last close; if
there are too many, the least recently used are given back. An id is given back only while no
program has the file open, as the kernel would refuse every further open of such an inode.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import trio

from fusefs.cache.cached_file import CacheFile

logger = logging.getLogger("fusefs.passthrough")

# Each id holds a file open in the kernel (about 1 KiB), outside of RLIMIT_NOFILE.
MOST_IDS = 16384
# Files that are registered by one message, at most (keeper/protocol.py).
MOST_AT_ONCE = 16
_NO_PASSTHROUGH = "this kernel has no FUSE passthrough (Linux 6.9 or later has)"
_DISK_REFUSES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class Registrar(Protocol):
    """The process that has the privilege to register files: the keeper (keeper/client.py)."""

    async def open_backing(self, fds: Sequence[int]) -> list[tuple[int, int]]: ...
    def close_backing(
        self, backing_id: int, done: Callable[[int, int], None] | None = None
    ) -> trio.Event: ...


class PassthroughFiles:
    """The files that one mount has registered with the kernel. Belongs to the event loop.

    `ids` has the id of each file; `is_on` is True if passthrough works, `why` says why or why not.
    """

    registrar: Registrar

    def __init__(
        self,
        registrar: Registrar | None = None,
        why: str = "not negotiated yet",
        most: int = MOST_IDS,
    ) -> None:
        if registrar is not None:
            self.registrar = registrar
        self._most = most
        self.is_on = False
        self.why = why
        # Least recently used first; always the same dict.
        self.ids: OrderedDict[CacheFile, int] = OrderedDict()
        self._registering: dict[CacheFile, trio.Event] = {}
        # Pinned, open files that `FileCache` will register soon, unless an open takes them along.
        self.gathered: list[CacheFile] = []
        # Ids being given back, with their st_ino: while no keeper runs they stay registered.
        self._leaving: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def can_register(self) -> bool:
        """True if there is a keeper that registers files."""
        return hasattr(self, "registrar")

    async def turn_on(self, is_negotiated: bool, cache: Path) -> None:
        """Turn passthrough on if negotiated and the kernel registers a trial file in `cache`."""
        self.is_on = False
        if not is_negotiated:
            self.why = _NO_PASSTHROUGH
            return
        try:
            with tempfile.TemporaryFile(dir=cache) as probe:
                [(backing_id, error)] = await self.registrar.open_backing([probe.fileno()])
                if backing_id:
                    self.registrar.close_backing(backing_id)
        except OSError as refusal:
            error = refusal.errno or errno.EIO
        # On a full disk the trial fails; if the last daemon had ids, passthrough works.
        if error and not (self.ids and error in _DISK_REFUSES):
            self.why = _explain(error)
            return
        self.is_on = True
        self.why = "the kernel reads cached files itself"

    def find(self, file: CacheFile) -> int:
        """The id under which a file is registered, or 0. Marks the id as recently used."""
        backing_id = self.ids.get(file, 0)
        if backing_id:
            self.ids.move_to_end(file)
        return backing_id

    async def register(self, file: CacheFile) -> int:
        """Register a pinned, open file; return its id, or 0 if refused or passthrough is off."""
        while (event := self._registering.get(file)) is not None:
            await event.wait()
        known = self.find(file)
        if known or not self.is_on:
            return known
        for error in set(await self.register_all([file, *self.gathered[: 2 * MOST_AT_ONCE]])):
            logger.warning("the kernel refused a file for passthrough: %s", _explain(error))
        return self.ids.get(file, 0)

    async def register_all(self, files: Iterable[CacheFile]) -> list[int]:
        """Register at most MOST_AT_ONCE of these pinned, open files in one message.

        Returns the errnos of the refused files only; the next open of such a file tries again.
        """
        unique = dict.fromkeys(files)
        new = [file for file in unique if file not in self.ids and file not in self._registering]
        new = new[:MOST_AT_ONCE]
        if not new or not self.is_on:
            return []
        event = trio.Event()
        self._registering |= dict.fromkeys(new, event)
        try:
            answers = await self.registrar.open_backing([file.fd for file in new])
        finally:
            for file in new:
                del self._registering[file]
            event.set()
        self.ids |= {file: found for file, (found, _) in zip(new, answers, strict=True) if found}
        while len(self.ids) > self._most:
            unused = next((file for file in self.ids if not file.pins), None)
            if unused is None:
                break
            self.drop(unused)
        return [error for _, error in answers if error]

    async def wait_for(self, files: Iterable[CacheFile]) -> None:
        """Wait until no registration of these files is under way."""
        for file in files:
            if (event := self._registering.get(file)) is not None:
                await event.wait()

    def table(self) -> list[tuple[int, int]]:
        """List (id, st_ino) of all registered files, also of those that are being given back."""
        used = [(backing_id, file.st_ino) for file, backing_id in self.ids.items()]
        return [*used, *self._leaving.items()]

    def move_to(self, registrar: Registrar) -> None:
        """Use another keeper, which knows the `table`; ask it to close ids being given back."""
        self.registrar = registrar
        for backing_id, st_ino in list(self._leaving.items()):
            self._give_back(backing_id, st_ino)

    def take_over(
        self,
        registered: Mapping[int, tuple[int, int]],
        opened: Iterable[tuple[CacheFile, int]],
        whole: Mapping[int, CacheFile],
    ) -> None:
        """Take over the ids that an earlier process registered, as {id: (st_dev, st_ino)}.

        `opened` has the file of each open handle with its id or 0, `whole` the complete files of
        the cache by inode number. An id that belongs to none of these files is given back.
        """
        used = {backing_id: file for file, backing_id in opened if backing_id}
        self.ids |= {file: backing_id for backing_id, file in used.items()}
        for backing_id, (_, st_ino) in registered.items():
            if backing_id in used:
                continue
            known = whole.get(st_ino)
            if known is not None and known not in self.ids:
                self.ids[known] = backing_id
            else:
                self._give_back(backing_id, st_ino)

    def drop(self, file: CacheFile) -> trio.Event | None:
        """Give back the id of a file that no program has open; return an event, or None if no id.

        The event is set when the kernel has closed the file, or when the keeper has died; in the
        latter case the next keeper gives the id back.
        """
        backing_id = self.ids.pop(file, 0)
        return self._give_back(backing_id, file.st_ino) if backing_id else None

    def _give_back(self, backing_id: int, st_ino: int) -> trio.Event:
        self._leaving[backing_id] = st_ino

        def done(_: int, error: int) -> None:
            if error != errno.ECONNRESET:
                self._leaving.pop(backing_id, None)

        return self.registrar.close_backing(backing_id, done)

    def drop_unused(self) -> None:
        """Give back the ids of all files that no program has open."""
        for file in [file for file in self.ids if not file.pins]:
            self.drop(file)


_REASONS = {
    errno.EPERM: "registering files needs CAP_SYS_ADMIN in the initial user namespace",
    errno.ELOOP: "the cache is on a file system that is itself stacked",
    errno.EXDEV: "the cache is on an overlay of several file systems",
    errno.ENOTTY: _NO_PASSTHROUGH,
    errno.EINVAL: _NO_PASSTHROUGH,
}


def _explain(error: int) -> str:
    return _REASONS.get(error) or os.strerror(error)
