"""Modes, owners, times and attributes of objects, which listings lack: from HEAD requests.

A writable mount sends a HEAD for each name that is looked up, unless the object is
assumed to have no attributes (head_policy.py). When a program looks at one name after
the other in the order of the listing (`ls -l`, `rsync`), HEADs of the following names
are sent along: one, two, four, and at most MOST_AHEAD. In each folder that a walk is
about to reach, one file has its HEAD ahead where that may decide for all of them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import trio

from fusefs.posix.directory.listings import Directories
from fusefs.posix.directory.segment import Entry, Segment
from fusefs.posix.metadata import object_metadata as meta
from fusefs.posix.metadata.object_metadata import SECOND_NS, Meta
from fusefs.posix.nodes import names
from fusefs.posix.nodes.inode_table import Inode, InodeTable, Ownership
from fusefs.store.errors import NotFoundError, StoreError
from fusefs.store.interface import ObjectInfo, Store
from fusefs.telemetry.stalls import Work

# As many as requests may run at once by default.
MOST_AHEAD = 32
# Fewer, for a connection that is open costs less than a new one, and the first may be enough.
SAMPLED_AT_ONCE = 16
# Answers that no request has used yet, and directories that are walked through.
MOST_KEPT = 4096
MOST_SCANS = 64
# Versions whose attributes are remembered, at about 100 bytes for each.
MOST_REMEMBERED = 200_000
# S3 has times in whole seconds, and by a clock of its own.
SETTLED_NS = 5 * SECOND_NS


class PendingHead:
    """One HEAD, under way or answered. `info` is None if there is no such object.

    `sent` is in seconds of the monotonic clock.
    """

    __slots__ = ("done", "error", "info", "sent", "work")

    def __init__(self) -> None:
        self.sent = time.monotonic()
        self.done = trio.Event()
        self.info: ObjectInfo | None = None
        self.error: StoreError | None = None
        self.work = Work()


class ScanState:
    """A program that goes through a directory in order, with HEADs sent ahead of it.

    `last` is the name it looked at last, `width` how many names were sent ahead
    at the last step, and `remaining` how many of them it has not reached.
    """

    __slots__ = ("last", "remaining", "width")

    def __init__(self) -> None:
        self.last = ""
        self.width = 0
        self.remaining = 0


class HeadCache:
    """The attributes of one mount's objects. Belongs to the event loop.

    HEADs run in `nursery`; None on a read-only mount, where all attributes are
    those of the settings. `deferred` has the attributes of a version that its
    object does not have yet.
    """

    def __init__(
        self,
        store: Store,
        directories: Directories,
        inodes: InodeTable,
        owner: Ownership,
        nursery: trio.Nursery | None,
        deferred: Callable[[ObjectInfo], Meta | None] | None = None,
    ) -> None:
        self._store = store
        self._directories = directories
        self._inodes = inodes
        self._owner = owner
        self._nursery = nursery
        self._policy = directories.head_policy
        self._pending: OrderedDict[str, PendingHead] = OrderedDict()
        self._scans: OrderedDict[str, ScanState] = OrderedDict()
        self._deferred = deferred
        # Directories in which the HEAD of a first file is under way.
        self._sampled: dict[str, PendingHead] = {}
        if nursery is not None:
            directories.expect = self._sample_ahead
        # The attributes of versions, None for no attributes, by `_version`: the kernel
        # forgets names, and looks them up again, sooner than the attributes change.
        self._remembered: OrderedDict[int, Meta | None] = OrderedDict()

    @property
    def is_on(self) -> bool:
        """Whether objects have modes and owners at all."""
        return self._nursery is not None

    def needs_head(self, inode: Inode) -> bool:
        """Whether an inode's attributes take a HEAD before they are shown."""
        if not self.lacks(inode):
            return False
        return inode.parent is None or _modified_ns(inode) > self.no_attributes_until(inode.parent)

    def needs_head_of(self, inode: Inode, no_attributes_until: float) -> bool:
        """As `needs_head`, with the `no_attributes_until` of the inode's directory."""
        return self.lacks(inode) and _modified_ns(inode) > no_attributes_until

    def no_attributes_until(self, directory: Inode) -> float:
        """As `HeadPolicy.no_attributes_until`, in ns since the epoch."""
        return self._policy.no_attributes_until(self._inodes.key(directory))

    def lacks(self, inode: Inode) -> bool:
        """Whether the attributes of an inode's object are not known."""
        if self._nursery is None or inode.meta is not None or inode.staged is not None:
            return False
        if inode.is_removed:
            return False  # its object is gone
        if inode.info is None:
            # A whole bucket's root has no key, and so no object with attributes.
            return bool(inode.parent is not None or self._inodes.prefix)
        waiting = self._deferred(inode.info) if self._deferred is not None else None
        if waiting is not None:
            inode.meta, inode.packed = waiting, None
            return False
        version = _version(inode.info)
        if version not in self._remembered:
            return True
        self._remembered.move_to_end(version)
        inode.meta = self._remembered[version] or inode.default_meta(self._owner)
        inode.packed = None
        return False

    def meta(self, inode: Inode) -> Meta:
        """An inode's attributes, as far as they are known."""
        inode = inode.lead or inode
        if inode.staged is not None:
            return inode.staged.meta
        return inode.meta or inode.default_meta(self._owner)

    async def show(self, inode: Inode) -> None:
        """Have the attributes of an inode that stat shows, which may be assumed.

        Raises:
            StoreError: the HEAD failed.
        """
        if self.needs_head(inode):
            await self.learn(inode)

    async def learn(self, inode: Inode) -> None:
        """Have the attributes of an inode's object, before any of them is changed.

        Raises:
            StoreError: the HEAD failed.
        """
        if not self.lacks(inode):
            return
        key = self._inodes.key(inode)
        head = self._pending.pop(key, None)
        if head is not None and not self._is_about(head, inode):
            head = None
        self._look_ahead(inode, is_expected=head is not None)
        await self._take(inode, head or self._send(key))

    async def show_all(self, directory: Inode, inodes: Sequence[Inode]) -> None:
        """As `show`, for several of one directory at once."""
        prefix = self._inodes.key(directory)
        while batch := [inode for inode in inodes if self.needs_head(inode)]:
            batch = batch[: max(1, self._policy.remaining(prefix))]
            heads = [self._send(self._inodes.key(inode)) for inode in batch]
            for inode, head in zip(batch, heads, strict=True):
                await self._take(inode, head)

    def wants_sample(self, directory: Inode) -> bool:
        """Whether HEADs of a few of a directory's files may spare those of the others."""
        return self._policy.is_undecided(self._inodes.key(directory))

    async def sample(self, directory: Inode, inodes: Sequence[Inode]) -> None:
        """Send HEADs of a few of a directory's files, which may spare those of the others."""
        prefix = self._inodes.key(directory)
        if prefix in self._sampled:
            sampled = self._sampled[prefix]
            with sampled.work.awaited():
                await sampled.done.wait()
        unknown = [inode for inode in inodes if self.needs_head(inode)]
        while unknown and self._policy.is_undecided(prefix):
            few = unknown[: min(SAMPLED_AT_ONCE, self._policy.remaining(prefix))]
            del unknown[: len(few)]
            heads = [self._send(self._inodes.key(inode)) for inode in few]
            for inode, head in zip(few, heads, strict=True):
                try:
                    await self._take(inode, head)
                except StoreError:
                    continue  # a request for its attributes will fail

    def _sample_ahead(self, prefix: str, segment: Segment) -> None:
        """Send the HEAD of one file where that may spare those of its whole directory."""
        if not self._policy.is_undecided(prefix) or len(self._sampled) >= MOST_AHEAD:
            return
        first = next((entry for entry in segment.entries.values() if entry is not None), None)
        if self._policy.remaining(prefix) == 1 and first is not None and self.lacks_version(first):
            assert self._nursery is not None
            self._sampled[prefix] = PendingHead()
            self._nursery.start_soon(self._sample_one, prefix, first)

    async def _sample_one(self, prefix: str, info: ObjectInfo) -> None:
        try:
            with self._sampled[prefix].work.doing():
                await self.learn_version(info)
        finally:
            self._sampled.pop(prefix).done.set()

    def lacks_version(self, info: ObjectInfo) -> bool:
        """Whether `learn_version` would send a HEAD."""
        has_room = len(self._remembered) < MOST_REMEMBERED
        if self._nursery is None or not has_room or _version(info) in self._remembered:
            return False
        return not self._policy.has_no_attributes(_directory(info.key), info.mtime_ns)

    async def learn_version(self, info: ObjectInfo) -> None:
        """Remember a listed object's attributes before its name is looked up.

        Where the HEAD fails, or finds another version, nothing is remembered.
        """
        try:
            current = await self._store.head(info.key)
        except StoreError:
            return
        self._observe(current)
        default = self._owner.file
        if _is_same(current, info) and _is_settled(current):
            known = meta.read(current.metadata or {}, default)
            self._remember(current, None if known == default else known)

    async def _take(self, inode: Inode, head: PendingHead) -> None:
        """Wait for an answer, and have the inode keep it."""
        with head.work.awaited():
            await head.done.wait()
        if head.error is not None:
            raise head.error
        if self.lacks(inode):
            # Without an object: a directory that has no marker, or a file that is just going.
            metadata = head.info.metadata if head.info is not None else None
            default = inode.default_meta(self._owner)
            inode.meta = meta.read(metadata or {}, default)
            inode.packed = None
            info = head.info
            if info is not None and _is_same(info, inode.info) and _is_settled(info):
                self._remember(info, None if inode.meta == default else inode.meta)

    def _remember(self, info: ObjectInfo, known: Meta | None) -> None:
        self._remembered[_version(info)] = known
        if len(self._remembered) > MOST_REMEMBERED:
            self._remembered.popitem(last=False)

    def _is_about(self, head: PendingHead, inode: Inode) -> bool:
        """Whether a HEAD is of the version that an inode stands for, and not too old."""
        if time.monotonic() - head.sent > self._directories.ttl_s or head.error:
            return False
        info = head.info
        return inode.info is None or info is None or info.etag == inode.info.etag

    def _send(self, key: str) -> PendingHead:
        assert self._nursery is not None
        head = PendingHead()
        self._nursery.start_soon(self._run, key, head)
        return head

    async def _run(self, key: str, head: PendingHead) -> None:
        try:
            with head.work.doing():
                head.info = await self._store.head(key)
            self._observe(head.info)
        except NotFoundError:
            self._policy.observe(_directory(key), 0, has_attributes=False)
        except StoreError as error:
            head.error = error
        finally:
            head.done.set()

    def _observe(self, info: ObjectInfo) -> None:
        modified_ns = 0 if info.key.endswith("/") else info.mtime_ns
        has_attributes = meta.has_attributes_in(info.metadata or {})
        self._policy.observe(_directory(info.key), modified_ns, has_attributes=has_attributes)

    # Ahead

    def _look_ahead(self, inode: Inode, *, is_expected: bool) -> None:
        """Send HEADs of the next names of a directory if it is read in order."""
        if inode.parent is None or not self._directories.ttl_s:
            return
        prefix = self._inodes.key(inode.parent)
        segment = self._directories.get(prefix).holding(inode.name)
        if segment is None or segment.expires <= time.monotonic():
            return
        scan = self._scan(prefix)
        behind = segment.after(names.position(inode.name))
        before = segment.ordered[behind - 2] if behind > 1 else scan.last
        is_in_order = is_expected or (bool(scan.last) and before == scan.last)
        scan.last = inode.name
        scan.remaining = max(0, scan.remaining - 1)
        if not is_in_order:
            scan.width = scan.remaining = 0
        elif 2 * scan.remaining <= scan.width:
            most = min(MOST_AHEAD, self._policy.remaining(prefix))
            scan.width = scan.remaining = min(most, max(1, 2 * scan.width))
            for name in segment.ordered[behind : behind + scan.width]:
                self._send_ahead(inode.parent, prefix, name, segment.entries[name])

    def _scan(self, prefix: str) -> ScanState:
        scan = self._scans.setdefault(prefix, ScanState())
        self._scans.move_to_end(prefix)
        if len(self._scans) > MOST_SCANS:
            self._scans.popitem(last=False)
        return scan

    def _send_ahead(self, parent: Inode, prefix: str, name: str, entry: Entry) -> None:
        key = prefix + name if entry is not None else prefix + name + "/"
        known = (parent.children or {}).get(name)
        if key in self._pending or (known is not None and not self.lacks(known)):
            return
        self._pending[key] = self._send(key)
        if len(self._pending) > MOST_KEPT:
            self._pending.popitem(last=False)


def _directory(key: str) -> str:
    """The prefix of the directory that a key, or a marker, is in."""
    return key[: key.rstrip("/").rfind("/") + 1]


def _modified_ns(inode: Inode) -> int:
    return inode.info.mtime_ns if inode.info is not None else 0


def _version(info: ObjectInfo) -> int:
    """A number that no other object has, nor this one after its metadata is changed."""
    # Some servers list parts of seconds, which a HEAD lacks.
    return hash((info.key, info.etag, info.size, info.mtime_ns // SECOND_NS))


def _is_settled(info: ObjectInfo) -> bool:
    """Whether a further change of its metadata would show in its time."""
    return time.time_ns() - info.mtime_ns > SETTLED_NS


def _is_same(info: ObjectInfo, known: ObjectInfo | None) -> bool:
    return known is not None and _version(info) == _version(known)
