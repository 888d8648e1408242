"""The node table: what the kernel's node ids stand for.

A node id stands for one content. A file's is one version of one object, so
when somebody else has replaced the object, its name gets a new node id and
the old one lives on for the handles that hold it; `ino`, which programs see
as st_ino, is the file's and stays the same (file_numbers.py). Node ids are never
used twice while mounted.

Each inode counts how often the kernel got its id (`nlookup`) and goes
when the kernel has forgotten it as often. What the table holds is written to
the journal before the reply that tells the kernel about it, so that another
process can go on with the same ids.

The table belongs to the event loop; nothing here waits.
"""

from __future__ import annotations

import errno
import math
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import trio

from fusefs.posix.nodes.file_numbers import ROOT_ID, FileNumbers
from fusefs.posix.nodes.inode import FIRST_ID, Attributes, Inode, LinkedNames, Ownership
from fusefs.posix.nodes.notifier import KernelNotifications
from fusefs.posix.nodes.offsets import MOST_MARKS
from fusefs.store.interface import ObjectInfo, ObjectVersion

__all__ = ["FIRST_ID", "ROOT_ID", "Attributes", "Inode", "InodeTable", "NodeLog", "Ownership"]

# What the bucket has of versions that were copied.
Copies = Mapping[ObjectVersion, ObjectInfo]

# For how long attributes are shown at least, in seconds; they are those of one version.
FIRST_S = 1.0
# How much later a listing may date a change of ours.
CLOCKS_DIFFER_NS = 1_000_000_000


class NodeLog:
    """The record of what the kernel believes, written before each reply (journal/journal.py).

    As it stands nothing is on record.
    """

    def node(self, inode: Inode) -> None:
        """The kernel is about to know a node, or the node has another name, key or version."""

    def count(self, inode: Inode) -> None:
        """The kernel is about to have this lookup count of a node."""

    def gone(self, nodeid: int) -> None:
        """The kernel knows a node no longer."""

    def mark(self, nodeid: int, number: int, position: str) -> None:
        """The offsets of a directory's entries refer to a position; number 0: to none any more."""

    def replaced(self, nodeid: int) -> None:
        """A node stands for its name no longer; see `InodeTable.mark_replaced`."""

    def removed(self, nodeid: int) -> None:
        """As `replaced`, of a file whose name is gone, or another's; see `InodeTable.detach`."""

    def number(self, place: int, number: int) -> None:
        """A record of nodes/file_numbers.py; there is none any more if both are the same."""

    def stale(self, nodeid: int, pid: int, *, is_pending: bool) -> None:
        """A process got ESTALE for a node and has yet to look it up (`is_pending`), or did."""

    def opened(
        self, unique: int, fh: int, nodeid: int, flags: int, mode: int, backing_id: int
    ) -> None:
        """A request is about to be answered with a handle; backing id 0: the daemon reads."""

    def closed(self, fh: int) -> None:
        """A handle is released."""

    def negotiated(self, init_out: bytes) -> None:
        """The answer to INIT, which the next daemon has to keep to."""

    def table(self, next_id: int, next_fh: int, mounted_ns: int) -> None:
        """Numbers below these may have been used; `mounted_ns` is since the epoch."""

    def begun(self, unique: int) -> None:
        """A change is about to be made: if its request comes again, it may have been made."""

    @property
    def plain_log(self) -> object | None:
        """The log that compiled code may append to; None if records are not simply appended."""
        return None


class InodeTable:
    """All inodes by node id, and the current one of each name.

    `prefix` is the mount's own prefix in the bucket ("" or ending in `/`).
    `ids_are_inos`: a session whose protocol shows the node id as st_ino gets
    the stable number as node id wherever it is free. `crossed` is set when there are more than
    `most`.
    """

    def __init__(
        self,
        prefix: str,
        log: NodeLog,
        notifier: KernelNotifications | None = None,
        *,
        ids_are_inos: bool = False,
        most: int = sys.maxsize,
    ) -> None:
        self.prefix = prefix
        self._log = log
        self._ids_are_inos = ids_are_inos
        # No node id from here on has been used.
        self.next_id = FIRST_ID
        self.root = Inode(ROOT_ID, ROOT_ID, None, "", None)
        self.root.nlookup = 1
        self.by_id: dict[int, Inode] = {ROOT_ID: self.root}  # never another dict
        self.numbers = FileNumbers(
            prefix, log.number, self._new_id, lambda: {inode.ino for inode in self.by_id.values()}
        )
        # By directory and name, nodes of linked files that were replaced, and not looked up since.
        self._unresolved_links: dict[tuple[int, str], Inode] = {}
        self._notifier = notifier or KernelNotifications()
        # When the kernel last dropped a node, by the monotonic clock.
        self.forgotten_at = -math.inf
        self.most = most
        self.crossed = trio.Event()

    @property
    def is_full(self) -> bool:
        """True if listings hand out no more nodes, where the session can do that."""
        return len(self.by_id) > self.most

    def __len__(self) -> int:
        return len(self.by_id)

    def all(self) -> list[Inode]:
        return list(self.by_id.values())

    def adopt_name(self, inode: Inode, parent_id: int, *, is_current: bool) -> None:
        """Give a restored node its parent; the youngest that `is_current` has the name."""
        parent = inode.parent = self.by_id.get(parent_id, self.root)
        assert parent.children is not None
        rival = parent.children.get(inode.name)
        inode.is_current = is_current and (rival is None or rival.nodeid < inode.nodeid)
        if inode.is_current:
            parent.children[inode.name] = inode
            if rival is not None:
                rival.is_current = False

    def get(self, nodeid: int) -> Inode:
        """Return the inode of a node id; ESTALE if that is not, or no longer, known."""
        try:
            return self.by_id[nodeid]
        except KeyError:
            raise OSError(errno.ESTALE, f"unknown node id {nodeid}") from None

    def directory(self, nodeid: int) -> Inode:
        """Return the inode of a directory; ENOTDIR if it is none."""
        inode = self.get(nodeid)
        if inode.children is None:
            raise OSError(errno.ENOTDIR, "not a directory")
        return inode

    def find(self, nodeid: int) -> Inode | None:
        return self.by_id.get(nodeid)

    def key(self, inode: Inode) -> str:
        """The full key of a file, or the prefix (ending in `/`, or empty) of a directory."""
        if inode.info is not None:
            return inode.info.key
        path = ""
        while inode.parent is not None:
            path = f"{inode.name}/{path}"
            inode = inode.parent
        return self.prefix + path

    def resolve(self, parent: Inode, name: str, info: ObjectInfo | None) -> Inode:
        """The current inode of a name, new if that stands for something else; None: a directory."""
        assert parent.children is not None
        inode = parent.children.get(name)
        if inode is not None:
            known = inode.info
            # What is being written here is not replaced by what a listing says.
            if known is info or inode.staged is not None:
                return inode
            # Another listing of the same version: only what stat shows may differ.
            if known is not None and info is not None and _same_version(known, info):
                if info.mtime_ns > known.mtime_ns + CLOCKS_DIFFER_NS:
                    inode.meta = None  # somebody else has given it another mode, say
                inode.info = info
                inode.packed = None
                self._log.node(inode)
                return inode
            self.mark_replaced(inode)
        linked = None
        if self._unresolved_links:
            linked = self._unresolved_links.pop((parent.nodeid, name), None)
        if linked is not None:
            replaced = linked.info
            if info is None or replaced is None or not _same_version(replaced, info):
                self._unlink(linked)
        ino = self.numbers.of(parent, name, is_directory=info is None)
        is_id = self._ids_are_inos and ino not in self.by_id
        inode = Inode(ino if is_id else self._new_id(), ino, parent, name, info)
        if linked is not None and linked.links is not None:
            linked.links.replace(linked, inode)
        self.by_id[inode.nodeid] = inode
        parent.children[name] = inode
        if len(self.by_id) > self.most:
            self.crossed.set()
        return inode

    def count(self, inode: Inode, valid_until: float, *, was_asked: bool = True) -> None:
        """Log that the kernel gets a node id once more; the bucket `was_asked` just now."""
        inode.nlookup += 1
        inode.valid_until = valid_until
        inode.shown_until = max(valid_until, time.monotonic() + FIRST_S)
        inode.looked_up = was_asked
        if inode.nlookup == 1:
            self._log.node(inode)
        else:
            self._log.count(inode)

    def mark(self, directory: Inode, position: str) -> int:
        """The number of a position to which offsets refer; that of a new one is logged."""
        if not position:
            return 0
        marks = directory.marks
        if marks is None:
            marks = directory.marks = {}
        number = marks.get(position)
        if number is None:
            number = marks[position] = min(len(marks) + 1, MOST_MARKS)
            self._log.mark(directory.nodeid, number, position)
        return number

    def forget_marks(self, directory: Inode) -> None:
        """Neither an open stream nor the kernel's copy of the listing has offsets any more."""
        if directory.marks is not None:
            directory.marks = None
            self._log.mark(directory.nodeid, 0, "")

    def mark_replaced(self, inode: Inode) -> None:
        """The inode stands for its name no longer: the next lookup makes another inode."""
        self._log.replaced(inode.nodeid)
        self._unlist(inode)
        if inode.links is not None and inode.parent is not None:
            self._unresolved_links[inode.parent.nodeid, inode.name] = inode

    def _unlist(self, inode: Inode) -> None:
        inode.is_current = False
        siblings = inode.parent.children if inode.parent is not None else None
        if siblings is not None and siblings.get(inode.name) is inode:
            del siblings[inode.name]

    def replace_version(self, inode: Inode, info: ObjectInfo) -> None:
        """Let an inode that is not open stand for another version from now on."""
        inode.info = info
        inode.packed = None
        self._log.node(inode)

    def create(self, parent: Inode, name: str, info: ObjectInfo) -> Inode:
        assert parent.children is not None
        old = parent.children.get(name)
        if old is not None:
            self.numbers.removed(parent, name, is_directory=old.info is None)
            self.mark_replaced(old)
        return self.resolve(parent, name, info)

    def at(self, key: str) -> Inode | None:
        """The node of a file's key or a directory's prefix, if the kernel knows it."""
        path, inode = key[len(self.prefix) :].removesuffix("/"), self.root
        for name in path.split("/") if path else ():
            child = inode.child(name)
            if child is None:
                return None
            inode = child
        return inode

    def doubt(self, prefix: str) -> None:
        """Have the files of a directory looked at again when they are opened next."""
        directory, now = self.at(prefix), time.monotonic()
        for inode in (directory.children or {}).values() if directory is not None else ():
            inode.valid_until = min(inode.valid_until, now)
            inode.looked_up = False

    def detach(self, nodes: Iterable[Inode]) -> None:
        """A name is gone, or another file's: one of its former `nodes` stands for the old file."""
        nodes = [inode for inode in nodes if not inode.is_removed]
        files = [inode for inode in nodes if inode.info is not None]
        lead = choose_lead(files) if files else None
        for inode in nodes:
            inode.packed = None
            if inode.info is None:
                self.mark_replaced(inode)
                continue
            self._log.removed(inode.nodeid)
            self._unlist(inode)
            if inode.links is not None:
                inode.links.leave(inode)
            inode.is_removed = True
            if inode is not lead:
                self._notifier.invalidate_attributes(inode.nodeid)

    def link(self, made: Inode, inode: Inode) -> None:
        """Show two names as those of one file until one of them changes; see `LinkedNames`."""
        if self._ids_are_inos:
            return
        self._renumber(made, inode.ino)
        links = inode.links or LinkedNames([inode], self._renumber, self._show)
        links.add(made)

    def link_again(self) -> None:
        """As `link`, for the nodes of an earlier process that were."""
        seen: set[int] = set()
        shared: set[int] = set()
        files = [node for node in self.by_id.values() if node.info is not None]
        for node in files:
            (shared if node.ino in seen else seen).add(node.ino)
        names: dict[int, dict[tuple[int, str], Inode]] = {}
        for node in sorted(files, key=lambda node: (node.is_current, node.nodeid)):
            if node.ino in shared and not node.is_removed and node.parent is not None:
                names.setdefault(node.ino, {})[node.parent.nodeid, node.name] = node
        for nodes in names.values():
            if len(nodes) > 1:
                LinkedNames(nodes.values(), self._renumber, self._show)
                self._unresolved_links |= {
                    name: node for name, node in nodes.items() if not node.is_current
                }

    def _unlink(self, inode: Inode) -> None:
        """A linked name is a file by itself from now on."""
        if inode.links is not None and inode.parent is not None:
            self._unresolved_links.pop((inode.parent.nodeid, inode.name), None)
            inode.links.leave(inode)
            self.numbers.removed(inode.parent, inode.name, is_directory=False)

    def _renumber(self, inode: Inode, number: int | None) -> None:
        inode.ino = self._new_id() if number is None else number
        self.numbers.give(inode, inode.ino)
        self._log.node(inode)
        self._show(inode)

    def _show(self, inode: Inode) -> None:
        """Have the kernel ask what a node looks like now."""
        inode.packed = None
        self._notifier.invalidate_attributes(inode.nodeid)

    def entries_changed(self, directory: Inode) -> None:
        """This mount has changed which names a directory has: that is its time from now on."""
        self.set_entries_changed(directory, time.time_ns())

    def set_entries_changed(self, directory: Inode, changed_ns: int) -> None:
        """Set when a directory's names last changed, in ns since the epoch."""
        if directory.entries_changed_ns != changed_ns:
            directory.entries_changed_ns = changed_ns
            directory.packed = None
            self._log.node(directory)

    def move(
        self, inode: Inode, parent: Inode, name: str, copies: Copies = MappingProxyType({})
    ) -> None:
        """Give an inode, and all below it, another name; `copies` are what the bucket has there."""
        assert parent.children is not None
        replaced = parent.children.get(name)
        if replaced is not None and replaced is not inode:
            self.detach([replaced])
        if inode.parent is not None:
            self.numbers.moved(
                inode.parent, inode.name, parent, name, inode.ino, is_directory=inode.info is None
            )
        self._unlist(inode)
        inode.parent, inode.name, inode.is_current = parent, name, True
        parent.children[name] = inode
        self._rename(inode, self.key(parent) + name, copies)

    def _rename(self, inode: Inode, key: str, copies: Copies) -> None:
        if inode.info is None:
            key += "/"
            inode.streamed_generation = -1  # of another directory's listing
            for child in (inode.children or {}).values():
                self._rename(child, key + child.name, copies)
        if inode.info is not None:
            self.follow(inode, copies.get(inode.info.version), key)
        inode.packed = None
        self._log.node(inode)

    def follow(self, inode: Inode, copy: ObjectInfo | None, key: str) -> None:
        """Let an inode be of another key, and of the copy that the bucket has there."""
        if inode.meta is not None and inode.meta.mtime_ns is None:
            # A copy is younger, and says in its metadata how old the content is.
            inode.meta = inode.meta.changed(mtime_ns=inode.object.mtime_ns)
        if copy is None:
            inode.valid_until, inode.looked_up = 0.0, False
            copy = replace(inode.object, key=key)
        self.replace_version(inode, copy)

    def forget(self, nodeid: int, nlookup: int) -> None:
        """The kernel has dropped `nlookup` of its references; unknown ids are ignored."""
        inode = self.by_id.get(nodeid)
        if inode is None or nodeid == ROOT_ID:
            return
        self.forgotten_at = time.monotonic()
        inode.nlookup = max(0, inode.nlookup - nlookup)
        self._log.count(inode)
        self.drop_unknown(inode)

    def drop_unknown(self, inode: Inode) -> None:
        """Remove an inode that the kernel has no reference to."""
        parent = inode.parent
        if inode.nlookup or inode.is_open or inode.children or parent is None or inode.staged:
            return
        if self.by_id.get(inode.nodeid, inode) is not inode:
            return  # it was removed before, and another inode has its id
        self._unlist(inode)
        if inode.links is not None:
            self._unlink(inode)
        if self.by_id.pop(inode.nodeid, None) is not None:
            self._log.gone(inode.nodeid)
        # A directory whose last child goes may itself have been forgotten before.
        if not parent.nlookup:
            self.drop_unknown(parent)

    def _new_id(self) -> int:
        while self.next_id in self.by_id:
            self.next_id += 1
        self.next_id += 1
        return self.next_id - 1


def choose_lead(nodes: list[Inode]) -> Inode:
    """Have the one of these nodes of one file stand for it that has the latest content."""
    lead = max(nodes, key=lambda inode: (inode.is_current, inode.staged is not None, inode.nodeid))
    for inode in nodes:
        if inode is not lead:
            inode.lead = lead
            if lead.meta is None:
                lead.meta = inode.meta
    return lead


def _same_version(known: ObjectInfo, info: ObjectInfo) -> bool:
    return known.etag == info.etag and known.size == info.size and known.key == info.key
