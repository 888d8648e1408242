"""Cache files that become staged files, because the kernel reads them for programs.

A handle that is open for passthrough reads one file until it is closed, and so
does a mapping: what is written elsewhere they never see. So a file that they
read is taken out of the cache (cache/handover.py) and written in place. All
opens of its node are for passthrough then, since the kernel refuses to mix the
modes; those that write have FOPEN_DIRECT_IO beside it, with which their reads
and writes come here all the same, and mappings alone do not. What is stored
through those shows in the file's time, and is uploaded at close, or after munmap.

A file that is not this mount's and this version's alone is not taken out: one
that another mount uses, that handles of another node read through the daemon
(it was opened before it was whole), or that is the base of an edit.
"""

from __future__ import annotations

import os

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.disk import is_unused
from fusefs.posix.mount_state import MountState
from fusefs.posix.nodes.inode import Inode, StagedFile


class Sharing:
    """The cache files that writers share with readers. Belongs to the event loop."""

    def __init__(self, state: MountState) -> None:
        self._cache = state.cache
        self._backing = state.backing
        self._handles = state.handles

    async def begin(self, file: CacheFile) -> bool:
        """Prepare a cache file to be taken out, uncancelled; False if others use it as well."""
        if self._is_served(file):
            return False
        # What no program writes to is uploaded as it is here, too.
        if not (await self._cache.integrity.examine(file))[1]:
            return False
        with trio.CancelScope(shield=True):
            if not await self._cache.handover.prepare(file):
                return False
            # Those that open the node from now on have to get this file.
            is_registered = bool(await self._backing.register(file))
        if is_registered and not self._is_served(file):
            return True
        self._cache.handover.cancel(file)
        return False

    def _is_served(self, file: CacheFile) -> bool:
        return any(not handle.backing_id for handle in self._handles.of_file(file))

    def backing_id(self, staged: StagedFile) -> int:
        """The id by which a staged file is to be opened, 0 if its handles are served."""
        if staged.backing is None or staged.inode.served:
            return 0
        return self._backing.find(staged.backing)

    def is_ready(self, inode: Inode) -> bool:
        """True if a node's next handle can be in the mode that it has to be in."""
        backing = inode.staged.backing if inode.staged is not None else None
        return backing is None or bool(inode.served or self._backing.find(backing))

    async def register(self, inode: Inode) -> bool:
        """Have the kernel have a node's staged file again; False if it refuses it."""
        backing = inode.staged.backing if inode.staged is not None else None
        return backing is None or bool(await self._backing.register(backing))

    def recall(self, staged: StagedFile, st_ino: int) -> CacheFile | None:
        """The cache file that a staged file was, if the kernel reads it as the file `st_ino`."""
        if os.fstat(staged.fd).st_ino != st_ino:
            return None
        if staged.backing is None:
            file = staged.backing = CacheFile.dropped("", staged.size(), st_ino)
            file.fd = os.dup(staged.fd)
            file.pins = 1
            staged.may_be_mapped = True
            staged.clean = staged.stamp()
        return staged.backing

    async def is_mapped(self, file: CacheFile) -> bool:
        """True if a program has mapped a cache file that none has open; the kernel lets go."""
        if not self._backing.find(file) or self._is_open(file):
            return False
        if not await self._cache.ensure_open(file):
            return False
        return await self._is_used(file)

    async def is_let_go(self, staged: StagedFile) -> bool:
        """True if no program has a staged file open or mapped; else it is registered again."""
        file = staged.backing
        if file is None:
            return True
        if self._is_open(file) or staged.inode.is_open:
            return False
        if not await self._is_used(file):
            return True
        if not staged.inode.is_open:
            await self._backing.register(file)
        return False

    async def _is_used(self, file: CacheFile) -> bool:
        if self._is_open(file):
            return True  # meanwhile: its id is in use
        gone = self._backing.drop(file)
        if gone is not None:
            await gone.wait()
        if self._is_open(file):
            return True
        return file.fd >= 0 and not is_unused(file.fd)

    def _is_open(self, file: CacheFile) -> bool:
        return any(True for _ in self._handles.of_file(file))
