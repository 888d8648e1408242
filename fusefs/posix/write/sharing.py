"""Cache files that writers write in place, because the kernel reads these files for programs.

A passthrough handle reads one file until it is closed, and so does a mapping: neither sees bytes
that are written to another file. So a cache file that one of them reads is taken out of the cache
(cache/handover.py) and written in place. From then on all opens of its node are for passthrough, as
the kernel refuses to mix the modes; handles for writing have FOPEN_DIRECT_IO as well, so that the
daemon still gets their reads and writes, but sees no access through a mapping. Stores through a
mapping show in the file's modification time, and are uploaded at close, or after munmap.

A cache file with other users is not taken out: a file that another mount uses, that
handles of another node read through the daemon (opened before the file was whole), or
that is the base of an edit.
"""

from __future__ import annotations

import os

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.disk import is_unused
from fusefs.posix.mount_state import MountPart
from fusefs.posix.nodes.inode import Inode, StagedFile


class Sharing(MountPart):
    """Makes a cache file the staged file of its node, so that readers see what writers write."""

    async def begin(self, file: CacheFile) -> bool:
        """Prepare to take a file out of the cache, and register it for passthrough.

        False if the file has other users or wrong bytes, or if the kernel refuses it.
        """
        # Its unchanged bytes are uploaded as well, so their checksums are verified first.
        if file.served or not (await self._cache.integrity.examine(file))[1]:
            return False
        with trio.CancelScope(shield=True):
            if not await self._cache.handover.prepare(file):
                return False
            # Each later open of the node has to get this file.
            is_registered = bool(await self._backing.register(file))
        if is_registered and not file.served:
            return True
        self._cache.handover.cancel(file)
        return False

    def backing_id(self, staged: StagedFile) -> int:
        """The backing id for opens of a staged file, 0 if the daemon answers their reads."""
        if staged.backing is None or staged.inode.served:
            return 0
        return self._backing.find(staged.backing)

    def is_ready(self, inode: Inode) -> bool:
        """True if a node can be opened now; False if `register` has to be called before."""
        backing = inode.staged.backing if inode.staged is not None else None
        return backing is None or bool(inode.served or self._backing.find(backing))

    async def register(self, inode: Inode) -> bool:
        """Register a node's staged file for passthrough; False if the kernel refuses."""
        backing = inode.staged.backing if inode.staged is not None else None
        return backing is None or bool(await self._backing.register(backing))

    def recall(self, staged: StagedFile) -> CacheFile:
        """Return the `CacheFile` of a staged file that an earlier process had registered."""
        if staged.backing is None:
            found = os.fstat(staged.fd)
            file = staged.backing = CacheFile.dropped("", found.st_size, found.st_ino)
            file.fd = os.dup(staged.fd)
            file.pins = 1
            staged.may_be_mapped = True
            if staged.base is not None:
                self._cache.unpin(staged.base.file)
                staged.base = None  # its parts may lack what is stored unseen
            staged.clean = staged.stamp()
        return staged.backing

    async def is_mapped(self, file: CacheFile) -> bool:
        """True if a cache file without open handles is mapped; the check unregisters the file."""
        if not self._backing.find(file) or file.handles or not await self._cache.ensure_open(file):
            return False
        return await self._is_used(file)

    async def is_let_go(self, staged: StagedFile) -> bool:
        """True if no program has a staged file open or mapped; else the file stays registered."""
        file = staged.backing
        if file is None:
            return True
        if file.handles or staged.inode.is_open:
            return False
        if not await self._is_used(file):
            return True
        if not staged.inode.is_open:
            await self._backing.register(file)
        return False

    async def _is_used(self, file: CacheFile) -> bool:
        if file.handles:
            return True  # a program has opened the file meanwhile, so its id is in use
        if (gone := self._backing.drop(file)) is not None:
            await gone.wait()
        return bool(file.handles) or (file.fd >= 0 and not is_unused(file.fd))
