"""Restore an earlier process's nodes and open handles from the journal."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.readahead.window import Readahead
from fusefs.posix.journal.records import KernelState, LoggedHandle
from fusefs.posix.nodes.handles import PASSTHROUGH, SERVED, DirectoryHandle, FileHandle
from fusefs.posix.nodes.inode import Inode
from fusefs.posix.nodes.inode_table import ROOT_ID, InodeTable, choose_lead
from fusefs.posix.operations import Operations
from fusefs.posix.restore import leftovers as recovery

Backing = Mapping[int, tuple[int, int]]


async def restore(
    operations: Operations,
    state: KernelState,
    backing: Backing,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Restore the nodes, handles and staged files that the kernel or programs still use.

    `backing` are the files that the kernel reads by itself, as {id: (st_dev, st_ino)}: such
    a file is whole, even if the cache's catalog does not say so yet. `alive` is called as in
    `leftovers.adopt`.
    """
    restore_table(operations.inodes, state)
    if operations.mutations is not None:
        writer = operations.mutations.writer
        on_disk = writer.staging.on_disk()
        for nodeid in on_disk:
            alive()
            if (inode := operations.inodes.find(nodeid)) is not None:
                recovery.restore(writer, inode)
        for nodeid in on_disk:
            alive()
            if operations.inodes.find(nodeid) is None:
                path = writer.staging.directory / str(nodeid)
                recovery.adopt_file(writer, path, may_be_open=False)
        operations.mutations.changes.finish_switches()
        recovery.adopt_logs(writer, writer.staging.directory)
    backing_ids = {handle.backing_id for handle in state.handles.values()}
    read = {backing[id][1] for id in backing_ids if id in backing}
    whole = await operations.cache.whole_files(read) if read else {}
    dropped = _taken_out(operations, backing)
    for index, logged in enumerate(state.handles.values()):
        await _restore_handle(operations, logged, backing, whole, dropped)
        if index % 200 == 0:
            await trio.lowlevel.checkpoint()
    if operations.writer is not None:
        recovery.drop_unneeded(operations.writer)
    for nodeid, pid in state.stale:
        # The process got ESTALE for the node, and has not looked the name up since.
        if (opened := operations.inodes.find(nodeid)) is not None:
            operations.opener.redirects.recall(opened, pid)
    for inode in operations.inodes.all():
        operations.inodes.drop_unknown(inode)  # unless the kernel or an open stream needs it
    operations.handles.next_fh = state.next_fh


def _taken_out(operations: Operations, backing: Backing) -> dict[int, CacheFile]:
    """The staged files that are registered with the kernel, as cache files, by their backing ids.

    A program may have such a file mapped, even if the journal has no handle of it any more.
    """
    writer = operations.writer
    if writer is None:
        return {}
    staged = {os.fstat(file.fd).st_ino: file for file in writer.staging}
    return {
        backing_id: writer.sharing.recall(staged[st_ino])
        for backing_id, (_, st_ino) in backing.items()
        if st_ino in staged
    }


def restore_table(inodes: InodeTable, state: KernelState) -> None:
    """Restore the nodes that the kernel knows from an earlier process.

    If several nodes have one name, the name stands for the youngest node that the journal does not
    mark as replaced. No node counts as valid yet: an open asks the bucket.
    """
    inodes.next_id = state.next_id
    inodes.numbers.adopt(state.numbers)
    for node in state.nodes.values():
        if node.nodeid != ROOT_ID:
            inode = Inode(node.nodeid, node.ino, None, node.name, node.info)
            inodes.by_id[node.nodeid] = inode
        inodes.get(node.nodeid).entries_changed_ns = node.entries_changed_ns
    removed: dict[int, list[Inode]] = {}
    for node in state.nodes.values():
        if node.nodeid == ROOT_ID:
            continue  # recorded only for its modification time
        inode = inodes.get(node.nodeid)
        inode.nlookup = node.nlookup
        inodes.adopt_name(inode, node.parent, is_current=node.nodeid not in state.replaced)
        if node.nodeid in state.removed:
            inode.is_removed = True
            removed.setdefault(inode.ino, []).append(inode)
    for nodes in removed.values():
        choose_lead(nodes)
    inodes.link_again()
    for nodeid, marks in state.marks.items():
        if (directory := inodes.find(nodeid)) is not None:
            directory.marks = marks


async def _restore_handle(
    operations: Operations,
    logged: LoggedHandle,
    backing: Backing,
    whole: Mapping[int, CacheFile],
    dropped: dict[int, CacheFile],
) -> None:
    inode = operations.inodes.find(logged.nodeid)
    if inode is None:
        return  # its RELEASE is answered all the same
    if inode.info is None:
        operations.handles.adopt_directory(DirectoryHandle(logged.fh, inode, -1, logged.unique))
        return
    cache = operations.cache
    file = cache.pin(inode.info.version)
    cache.opened(file)
    if logged.mode == PASSTHROUGH:
        _, st_ino = backing.get(logged.backing_id, (0, 0))
        known = dropped.get(logged.backing_id)
        if known is None and whole.get(st_ino) is not file:
            await cache.assume_complete(file, st_ino)
        if known is not None or (st_ino and file.st_ino != st_ino):
            # The handle's cache file was dropped, as its bytes were wrong, and no other handle may
            # read it; or the file was taken out of the cache.
            if inode.is_current and inode.staged is None:
                operations.inodes.mark_replaced(inode)
            cache.unpin(file)
            if known is None:
                known = CacheFile.dropped(file.name, file.size, st_ino)
                dropped[logged.backing_id] = known
            file = known
            file.pins += 1
    handle = FileHandle(
        logged.fh, inode, inode.info.version, file, logged.backing_id, logged.flags, logged.unique
    )
    operations.handles.adopt_file(handle)
    if logged.mode == SERVED and not file.is_complete:
        handle.readahead = Readahead(operations.downloader, file)
