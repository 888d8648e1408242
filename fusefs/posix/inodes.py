"""The node table: what the kernel's node ids stand for.

A node id stands for one content. A file's is one version of one object, so
when somebody else has replaced the object, its name gets a new node id and
the old one lives on for the handles that hold it; `ino`, which programs see
as st_ino, is a stable hash of the key and stays the same. Node ids are never
used twice while mounted.

Each inode counts how often the kernel was told its id (`nlookup`) and goes
when the kernel has forgotten it as often. What the table holds is written to
the journal before the reply that tells the kernel about it, so that another
process can go on with the same ids.

The table belongs to the event loop; nothing here waits.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from fusefs.posix.meta import Meta
from fusefs.store.base import ObjectInfo

if TYPE_CHECKING:
    from fusefs.posix.journal import NodeLog
    from fusefs.posix.replay import KernelState
    from fusefs.posix.staging import Staged

ROOT_ID = 1
# How much later a listing may date a change of ours.
CLOCKS_DIFFER_NS = 1_000_000_000
# Below are the root and the offsets of "." and ".." in directory streams.
FIRST_ID = 16


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who owns what has no owner of its own, and with which permissions."""

    uid: int
    gid: int
    file_mode: int
    dir_mode: int


@dataclass(slots=True)
class Attributes:
    """What stat shows. `size` is in bytes, `blocks` are of 512, `mtime_ns` since the epoch."""

    ino: int
    size: int
    mtime_ns: int
    mode: int
    nlink: int
    uid: int
    gid: int
    blocks: int


class Inode:
    """One node id. Plain slots: there are as many as names that the kernel knows.

    `info` is the object version (None for a directory); `children` holds the
    current inode of each name (None for a file). `served` and `passthrough`
    count the open handles in each mode: one of them is always zero, because
    the kernel refuses to mix them in one inode. A directory's are all served,
    and `offsets` are the children that only its open streams may still name,
    by their node ids as offsets. `believed_until` is in seconds
    of the monotonic clock; `looked_up` says that the kernel asked for the name
    since the last open. `packed` is the session's own form of the attributes.
    """

    __slots__ = (
        "believed_until",
        "children",
        "info",
        "ino",
        "is_current",
        "looked_up",
        "meta",
        "name",
        "nlookup",
        "nodeid",
        "offsets",
        "packed",
        "parent",
        "passthrough",
        "served",
        "staged",
        "streamed_generation",
    )

    def __init__(
        self, nodeid: int, ino: int, parent: Inode | None, name: str, info: ObjectInfo | None
    ) -> None:
        self.nodeid = nodeid
        self.ino = ino
        self.parent = parent
        self.name = name
        self.info = info
        self.children: dict[str, Inode] | None = {} if info is None else None
        self.offsets: set[Inode] | None = set() if info is None else None
        self.nlookup = 0
        self.served = 0
        self.passthrough = 0
        self.believed_until = 0.0
        self.looked_up = False
        self.is_current = True
        # What the object's metadata says, on a writable mount; None until it was asked for.
        self.meta: Meta | None = None
        self.staged: Staged | None = None
        self.packed: bytes | None = None
        # The state of the listing that the kernel has read to its end (see directories.py).
        self.streamed_generation = -1

    @property
    def is_open(self) -> bool:
        return bool(self.served or self.passthrough)

    def ancestry(self) -> Iterator[Inode]:
        """This inode and its parents, without the root."""
        at: Inode | None = self
        while at is not None and at.parent is not None:
            yield at
            at = at.parent

    def default_meta(self, owner: Ownership) -> Meta:
        """What it has where the object says nothing."""
        if self.info is None:
            return Meta(stat.S_IFDIR | owner.dir_mode, owner.uid, owner.gid)
        return Meta(stat.S_IFREG | owner.file_mode, owner.uid, owner.gid)

    def attributes(self, owner: Ownership, mounted_ns: int) -> Attributes:
        """What stat shows; a directory is as old as the mount, for S3 keeps no time of it."""
        info, staged = self.info, self.staged
        meta = staged.meta if staged is not None else self.meta or self.default_meta(owner)
        if staged is not None:
            # The kernel may have written by itself: what the file says is the truth.
            found = os.fstat(staged.fd)
            return Attributes(
                self.ino, found.st_size, found.st_mtime_ns, meta.mode, int(not staged.is_unlinked),
                meta.uid, meta.gid, found.st_blocks,
            )  # fmt: skip
        if info is None:
            size, mtime_ns, nlink = 4096, mounted_ns, 2
        else:
            size, mtime_ns, nlink = info.size, info.mtime_ns, 1
        if meta.mtime_ns is not None:
            mtime_ns = meta.mtime_ns
        return Attributes(
            self.ino, size, mtime_ns, meta.mode, nlink, meta.uid, meta.gid, -(-size // 512)
        )


def stable_ino(key: str) -> int:
    """An inode number that depends on the key alone (63 bits, never a small one)."""
    number = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") >> 1
    return number if number >= FIRST_ID else number + FIRST_ID


class InodeTable:
    """All inodes by node id, and the current one of each name.

    `prefix` is the mount's own prefix in the bucket ("" or ending in `/`).
    `ids_are_inos`: a session whose protocol shows the node id as st_ino gets
    the stable number as node id wherever it is free.
    """

    def __init__(self, prefix: str, log: NodeLog, *, ids_are_inos: bool = False) -> None:
        self.prefix = prefix
        self._log = log
        self._ids_are_inos = ids_are_inos
        self._next_id = FIRST_ID
        self.root = Inode(ROOT_ID, ROOT_ID, None, "", None)
        self.root.nlookup = 1
        self._by_id: dict[int, Inode] = {ROOT_ID: self.root}

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[Inode]:
        return list(self._by_id.values())

    @property
    def next_id(self) -> int:
        """No node id from here on has been used."""
        return self._next_id

    def restore(self, state: KernelState) -> None:
        """Take up the nodes that an earlier process told the kernel of.

        Of the nodes of one name the youngest is current, unless it is on
        record as superseded. Nothing is believed yet: an open asks the bucket.
        """
        self._next_id = state.next_id
        for node in state.nodes.values():
            self._by_id[node.nodeid] = Inode(node.nodeid, node.ino, None, node.name, node.info)
        for node in state.nodes.values():
            inode = self._by_id[node.nodeid]
            inode.parent = self._by_id.get(node.parent, self.root)
            inode.nlookup = node.nlookup
            self._enlist(inode, is_current=node.nodeid not in state.superseded)

    def _enlist(self, inode: Inode, *, is_current: bool) -> None:
        assert inode.parent is not None
        assert inode.parent.children is not None
        rival = inode.parent.children.get(inode.name)
        inode.is_current = is_current and (rival is None or rival.nodeid < inode.nodeid)
        if inode.is_current:
            inode.parent.children[inode.name] = inode
            if rival is not None:
                rival.is_current = False

    def prune(self) -> None:
        """Remove what was restored and serves neither the kernel nor an open stream."""
        for inode in self.all():
            self.drop_unknown(inode)

    def get(self, nodeid: int) -> Inode:
        """Return the inode of a node id.

        Raises:
            OSError: ESTALE, the id is not (or no longer) known.
        """
        try:
            return self._by_id[nodeid]
        except KeyError:
            raise OSError(errno.ESTALE, f"unknown node id {nodeid}") from None

    def find(self, nodeid: int) -> Inode | None:
        return self._by_id.get(nodeid)

    def key(self, inode: Inode) -> str:
        """The full key of a file, or the prefix (ending in `/`, or empty) of a directory."""
        if inode.info is not None:
            return inode.info.key
        names = [at.name for at in inode.ancestry()]
        return self.prefix + "".join(name + "/" for name in reversed(names))

    def resolve(self, parent: Inode, name: str, info: ObjectInfo | None, key: str) -> Inode:
        """Return the current inode of a name; a new one if it stands for something else now.

        `info` None means a directory; `key` is the object's key or the
        directory's prefix.
        """
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
            self.supersede(inode)
        ino = stable_ino(key)
        inode = Inode(self._new_id(ino), ino, parent, name, info)
        self._by_id[inode.nodeid] = inode
        parent.children[name] = inode
        return inode

    def count(self, inode: Inode, believed_until: float) -> None:
        """Log that the kernel is about to be told this node id once more."""
        inode.nlookup += 1
        inode.believed_until = believed_until
        inode.looked_up = True
        if inode.nlookup == 1:
            self._log.node(inode)
        else:
            self._log.count(inode)

    def mention(self, inode: Inode) -> None:
        """Log that a directory stream is about to use this node id as an offset."""
        self._log.node(inode)
        if not inode.nlookup:
            self._keep_as_offset(inode)

    def close_directory(self, inode: Inode) -> None:
        """The last stream of a directory has been closed: its offsets mean nothing any more."""
        assert inode.offsets is not None
        offsets, inode.offsets = inode.offsets, set()
        for child in offsets:
            self.drop_unknown(child)
        self.drop_unknown(inode)

    def supersede(self, inode: Inode) -> None:
        """Let the next lookup of its name make a new inode."""
        self._log.superseded(inode.nodeid)
        self._unlist(inode)

    def _unlist(self, inode: Inode) -> None:
        inode.is_current = False
        siblings = inode.parent.children if inode.parent is not None else None
        if siblings is not None and siblings.get(inode.name) is inode:
            del siblings[inode.name]

    def replace_version(self, inode: Inode, info: ObjectInfo) -> None:
        """Let an inode that nobody has open stand for another version from now on."""
        inode.info = info
        inode.packed = None
        self._log.node(inode)

    def create(self, parent: Inode, name: str, info: ObjectInfo | None, key: str) -> Inode:
        """A new inode for a name that had none."""
        assert parent.children is not None
        old = parent.children.get(name)
        if old is not None:
            self.supersede(old)
        return self.resolve(parent, name, info, key)

    def move(self, inode: Inode, parent: Inode, name: str) -> None:
        """Give an inode, and everything below it, another name."""
        assert parent.children is not None
        old_key = self.key(inode)
        replaced = parent.children.get(name)
        if replaced is not None and replaced is not inode:
            self.supersede(replaced)
        self._unlist(inode)
        inode.parent, inode.name, inode.is_current = parent, name, True
        parent.children[name] = inode
        above = self.key(parent)
        if inode.info is not None:
            self._rename_key(inode, above + name)
        else:
            self._rename_below(inode, old_key, above + name + "/")
        self._log.node(inode)

    def _rename_below(self, directory: Inode, old: str, new: str) -> None:
        for child in (directory.children or {}).values():
            if child.info is not None:
                self._rename_key(child, new + child.info.key[len(old) :])
            else:
                self._rename_below(child, old, new)

    def _rename_key(self, inode: Inode, key: str) -> None:
        assert inode.info is not None
        inode.info = replace(inode.info, key=key)
        self._log.node(inode)

    def forget(self, nodeid: int, nlookup: int) -> None:
        """The kernel has dropped `nlookup` of its references; unknown ids are ignored."""
        inode = self._by_id.get(nodeid)
        if inode is None or nodeid == ROOT_ID:
            return
        inode.nlookup = max(0, inode.nlookup - nlookup)
        self._log.count(inode)
        self.drop_unknown(inode)

    def drop_unknown(self, inode: Inode) -> None:
        """Remove an inode that the kernel has no reference to, or keep it as an offset."""
        parent = inode.parent
        if inode.nlookup or inode.is_open or inode.children or parent is None:
            return
        if inode.staged is not None:
            return
        if parent.served:
            self._keep_as_offset(inode)
            return
        self._unlist(inode)
        if self._by_id.pop(inode.nodeid, None) is not None:
            self._log.gone(inode.nodeid)
        # A directory whose last child goes may itself have been forgotten before.
        if not parent.nlookup:
            self.drop_unknown(parent)

    def _keep_as_offset(self, inode: Inode) -> None:
        assert inode.parent is not None
        assert inode.parent.offsets is not None
        inode.parent.offsets.add(inode)

    def _new_id(self, ino: int) -> int:
        if self._ids_are_inos and ino not in self._by_id:
            return ino
        while self._next_id in self._by_id:
            self._next_id += 1
        self._next_id += 1
        return self._next_id - 1


def _same_version(one: ObjectInfo, other: ObjectInfo) -> bool:
    return one.etag == other.etag and one.size == other.size and one.key == other.key
