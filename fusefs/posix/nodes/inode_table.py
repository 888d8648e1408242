"""The node table: the inodes of all node ids that the kernel knows.

A node id stands for one content. A file's content is one version of one object, so when another
client has replaced the object, the name gets a new node id, and the old id stays for handles that
are open; both nodes have the file's `ino`, which programs see as st_ino (file_numbers.py). Node ids
are never used twice while mounted.

Each inode counts how often the kernel got its id (`nlookup`), and is removed when the kernel has
forgotten the id as often. Each change is written to the journal before the reply that tells the
kernel about it, so that the next process can continue with the same ids.

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

from fusefs.posix.journal.journal import Journal
from fusefs.posix.journal.records import FIRST_ID
from fusefs.posix.nodes.file_numbers import ROOT_ID, FileNumbers
from fusefs.posix.nodes.inode import Attributes, Inode, LinkedNames, Ownership
from fusefs.posix.nodes.notifier import KernelNotifier
from fusefs.posix.nodes.offsets import MOST_MARKS
from fusefs.store.interface import ObjectInfo, ObjectVersion

__all__ = ["ROOT_ID", "Attributes", "Inode", "InodeTable", "Ownership"]

# The new objects of versions that were copied to another key.
Copies = Mapping[ObjectVersion, ObjectInfo]

# The kernel may show the attributes of a version for at least this many seconds.
FIRST_S = 1.0
# S3's clock may date a change of this mount later than the mount does, by at most this.
CLOCKS_DIFFER_NS = 1_000_000_000


class InodeTable:
    """The inodes of one mount, by node id and by name.

    `prefix` is the mount's own prefix in the bucket ("" or ending in `/`). With `ids_are_inos`,
    the session shows node ids as st_ino, so a new node's id is its stable inode number wherever
    that is free. `crossed` is set when there are more than `most` nodes.
    """

    def __init__(
        self,
        prefix: str,
        log: Journal,
        notifier: KernelNotifier | None = None,
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
        # By directory and name: replaced nodes with hard links, until their names are looked up.
        self._unresolved_links: dict[tuple[int, str], Inode] = {}
        self.unlisted: set[Inode] = set()  # the nodes that are not current
        self._notifier = notifier or KernelNotifier()
        # When the kernel last forgot a node, in seconds of the monotonic clock.
        self.forgotten_at = -math.inf
        self.most = most
        self.crossed = trio.Event()

    @property
    def is_full(self) -> bool:
        """True if there are too many nodes: listings should then show names without nodes."""
        return len(self.by_id) > self.most

    def __len__(self) -> int:
        return len(self.by_id)

    def all(self) -> list[Inode]:
        return list(self.by_id.values())

    def adopt_name(self, inode: Inode, parent_id: int, *, is_current: bool) -> None:
        """Set a restored node's parent; a name stands for the newest of its `is_current` nodes."""
        parent = inode.parent = self.by_id.get(parent_id, self.root)
        assert parent.children is not None
        rival = parent.children.get(inode.name)
        former: Inode | None = inode
        if is_current and (rival is None or rival.nodeid < inode.nodeid):
            parent.children[inode.name], former = inode, rival
        if former is not None:
            former.is_current = False
            self.unlisted.add(former)

    def get(self, nodeid: int) -> Inode:
        """Return the inode of a node id; ESTALE if the id is unknown."""
        try:
            return self.by_id[nodeid]
        except KeyError:
            raise OSError(errno.ESTALE, f"unknown node id {nodeid}") from None

    def directory(self, nodeid: int) -> Inode:
        """Return the inode of a directory's node id; ENOTDIR for a file, ESTALE if unknown."""
        inode = self.get(nodeid)
        if inode.children is None:
            raise OSError(errno.ENOTDIR, "not a directory")
        return inode

    def find(self, nodeid: int) -> Inode | None:
        return self.by_id.get(nodeid)

    def key(self, inode: Inode) -> str:
        """The full key of a file, or the prefix of a directory (empty or ending in `/`)."""
        if inode.info is not None:
            return inode.info.key
        path = ""
        while inode.parent is not None:
            path = f"{inode.name}/{path}"
            inode = inode.parent
        return self.prefix + path

    def resolve(self, parent: Inode, name: str, info: ObjectInfo | None) -> Inode:
        """Return a name's inode; create one if `info` (None: a directory) is another object."""
        assert parent.children is not None
        inode = parent.children.get(name)
        if inode is not None:
            known = inode.info
            # A listing does not replace a file that is being written here.
            if known is info or inode.staged is not None:
                return inode
            # The listing has the same version, of which only the attributes may have changed.
            if known is not None and info is not None and _same_version(known, info):
                if info.mtime_ns > known.mtime_ns + CLOCKS_DIFFER_NS:
                    inode.meta = None  # another client may have changed it, for example the mode
                self.replace_version(inode, info)
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
        """Count and log a lookup of a node, on which opens rely until `valid_until` (monotonic s).

        `was_asked` is True if the bucket has just answered for the node.
        """
        inode.nlookup += 1
        inode.valid_until = valid_until
        inode.shown_until = max(valid_until, time.monotonic() + FIRST_S)
        inode.looked_up = was_asked
        if inode.nlookup == 1:
            inode.log_to(self._log)
        else:
            self._log.count(inode.nodeid, inode.nlookup)

    def mark(self, directory: Inode, position: str) -> int:
        """Return the number of a listing position, for offsets (offsets.py); log a new number."""
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
        """Drop a directory's marks, once no open handle and no kernel cache has their offsets."""
        if directory.marks is not None:
            directory.marks = None
            self._log.mark(directory.nodeid, 0, "")

    def mark_replaced(self, inode: Inode) -> None:
        """Separate an inode from its name: the next lookup of the name creates another inode."""
        self._log.replaced(inode.nodeid)
        self._unlist(inode)
        if inode.links is not None and inode.parent is not None:
            self._unresolved_links[inode.parent.nodeid, inode.name] = inode

    def former(self, parent: Inode, name: str) -> set[Inode]:
        """The open nodes that a name stood for earlier, before its present node."""
        nodes = (inode for inode in self.unlisted if inode.name == name)
        return {inode for inode in nodes if inode.parent is parent and inode.is_open}

    def _unlist(self, inode: Inode) -> None:
        inode.is_current = False
        self.unlisted.add(inode)
        siblings = inode.parent.children if inode.parent is not None else None
        if siblings is not None and siblings.get(inode.name) is inode:
            del siblings[inode.name]

    def replace_version(self, inode: Inode, info: ObjectInfo) -> None:
        """Give an inode another version of its object, and log that."""
        inode.info = info
        inode.packed = None
        inode.log_to(self._log)

    def create(self, parent: Inode, name: str, info: ObjectInfo) -> Inode:
        assert parent.children is not None
        if (old := parent.children.get(name)) is not None:
            self.numbers.removed(parent, name, is_directory=old.info is None)
            self.mark_replaced(old)
        return self.resolve(parent, name, info)

    def at(self, key: str) -> Inode | None:
        """The node that a key or a directory's prefix stands for; None if the kernel knows none."""
        path, inode = key[len(self.prefix) :].removesuffix("/"), self.root
        for name in path.split("/") if path else ():
            child = inode.child(name)
            if child is None:
                return None
            inode = child
        return inode

    def doubt(self, prefix: str) -> None:
        """Expire the files of the directory `prefix`: their next opens ask the bucket again."""
        directory, now = self.at(prefix), time.monotonic()
        for inode in (directory.children or {}).values() if directory is not None else ():
            inode.valid_until = min(inode.valid_until, now)
            inode.looked_up = False

    def detach(self, nodes: Iterable[Inode]) -> None:
        """Separate the nodes of one file from its name, which was removed or given to another file.

        Nodes of files become `is_removed`, and one of them the `lead` of the others.
        """
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
        """Show `made` and `inode` as hard links of one file until one changes (`LinkedNames`)."""
        if self._ids_are_inos:
            return
        self._renumber(made, inode.ino)
        links = inode.links or LinkedNames([inode], self._renumber, self._show)
        links.add(made)

    def link_again(self) -> None:
        """Link restored nodes again: nodes with equal numbers were linked in an earlier process."""
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
        """Make a hard link a file of its own; the next lookup of its name gives another number."""
        if inode.links is not None and inode.parent is not None:
            self._unresolved_links.pop((inode.parent.nodeid, inode.name), None)
            inode.links.leave(inode)
            self.numbers.removed(inode.parent, inode.name, is_directory=False)

    def _renumber(self, inode: Inode, number: int | None) -> None:
        inode.ino = self._new_id() if number is None else number
        self.numbers.give(inode, inode.ino)
        inode.log_to(self._log)
        self._show(inode)

    def _show(self, inode: Inode) -> None:
        """Make the kernel request a node's attributes again."""
        inode.packed = None
        self._notifier.invalidate_attributes(inode.nodeid)

    def entries_changed(self, directory: Inode) -> None:
        """Set a directory's modification time to now: this mount has changed its names."""
        self.set_entries_changed(directory, time.time_ns())

    def set_entries_changed(self, directory: Inode, changed_ns: int) -> None:
        """Set a directory's modification time, in ns since the epoch; 0 restores the default."""
        if directory.entries_changed_ns != changed_ns:
            directory.entries_changed_ns = changed_ns
            directory.packed = None
            directory.log_to(self._log)

    def move(
        self, inode: Inode, parent: Inode, name: str, copies: Copies = MappingProxyType({})
    ) -> None:
        """Rename an inode and everything below it; `copies` maps old versions to their copies."""
        assert parent.children is not None
        replaced = parent.children.get(name)
        if replaced is not None and replaced is not inode:
            self.detach([replaced])
        if inode.parent is not None:
            self.numbers.moved(
                inode.parent, inode.name, parent, name, inode.ino, is_directory=inode.info is None
            )
        self._unlist(inode)
        self.unlisted.discard(inode)
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
        inode.log_to(self._log)

    def follow(self, inode: Inode, copy: ObjectInfo | None, key: str) -> None:
        """Give an inode the object `copy`; None: its version at `key`, checked at the next open."""
        if inode.meta is not None and inode.meta.mtime_ns is None:
            # The copy's Last-Modified is newer; its metadata has the time of the content.
            inode.meta = inode.meta.changed(mtime_ns=inode.object.mtime_ns)
        if copy is None:
            inode.valid_until, inode.looked_up = 0.0, False
            copy = replace(inode.object, key=key)
        self.replace_version(inode, copy)

    def forget(self, nodeid: int, nlookup: int) -> None:
        """Subtract `nlookup` references that the kernel has dropped; ignore unknown ids."""
        inode = self.by_id.get(nodeid)
        if inode is None or nodeid == ROOT_ID:
            return
        self.forgotten_at = time.monotonic()
        inode.nlookup = max(0, inode.nlookup - nlookup)
        self._log.count(inode.nodeid, inode.nlookup)
        self.drop_unknown(inode)

    def drop_unknown(self, inode: Inode) -> None:
        """Remove an inode unless the kernel, a handle, a child or a staged file needs it."""
        parent = inode.parent
        if inode.nlookup or inode.is_open or inode.children or parent is None or inode.staged:
            return
        if self.by_id.get(inode.nodeid, inode) is not inode:
            return  # the inode was removed before, and another one has its id
        self._unlist(inode)
        self.unlisted.discard(inode)
        if inode.links is not None:
            self._unlink(inode)
        if self.by_id.pop(inode.nodeid, None) is not None:
            self._log.gone(inode.nodeid)
        # The kernel may have forgotten the parent before, which was kept for its last child.
        if not parent.nlookup:
            self.drop_unknown(parent)

    def _new_id(self) -> int:
        while self.next_id in self.by_id:
            self.next_id += 1
        self.next_id += 1
        return self.next_id - 1


def choose_lead(nodes: list[Inode]) -> Inode:
    """Choose a file's node with the latest content, and make it the `lead` of the others."""
    lead = max(nodes, key=lambda inode: (inode.is_current, inode.staged is not None, inode.nodeid))
    for inode in nodes:
        if inode is not lead:
            inode.lead = lead
            if lead.meta is None:
                lead.meta = inode.meta
    return lead


def _same_version(known: ObjectInfo, info: ObjectInfo) -> bool:
    return known.etag == info.etag and known.size == info.size and known.key == info.key
