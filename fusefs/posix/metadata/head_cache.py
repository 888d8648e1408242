"""HEAD requests for the attributes of objects (mode, owner, time, xattrs), which listings lack.

A writable mount sends a HEAD for each name that is looked up, unless the object is
assumed to have no attributes (directory/head_policy.py). If a program looks up one name
after the other in the order of the listing (`ls -l`, `rsync`), HEADs of the following names
are sent ahead: one, two, four, and at most MOST_AHEAD. In a folder that is listed, that a
program is about to reach, or in which a second name is looked up, HEADs of a few names are
sent at once (a *sample*) if their answers can decide for all other names.

A read-only mount assumes more. If assumed attributes deny a program access to a file, the kernel
requests the attributes again, and then gets those of the object. The GET of a small file brings
them as well. If an object that was shown as a file turns out to be a symbolic link, its name gets a
new node: an open of the old node fails with ESTALE, upon which the kernel looks the name up again
and follows the link.
"""

from __future__ import annotations

import errno
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import trio

from fusefs.posix.directory.head_policy import SAMPLE, Assumed
from fusefs.posix.directory.listings import Directories
from fusefs.posix.directory.segment import Entry, Segment
from fusefs.posix.nodes import names
from fusefs.posix.nodes import object_metadata as meta
from fusefs.posix.nodes.inode_table import Inode, InodeTable, Ownership
from fusefs.posix.nodes.notifier import KernelNotifier
from fusefs.posix.nodes.object_metadata import LONGEST_TARGET, SECOND_NS, Meta
from fusefs.store.contract import Store
from fusefs.store.errors import NotFoundError, StoreError
from fusefs.store.interface import ObjectInfo
from fusefs.telemetry.stalls import Work

# The default number of simultaneous requests.
MOST_AHEAD = 32
# The most answers that are kept for later requests; the most directories that are read in order.
MOST_KEPT = 4096
MOST_SCANS = 64
# The most versions whose attributes are remembered, at about 100 bytes each.
MOST_REMEMBERED = 200_000
# A GETATTR this soon after the attributes' expiry may mean that the kernel doubts them.
DOUBT_S = 1.0
# The kernel requests attributes again if it got them while it dropped another inode (`evict_ctr`
# in its fs/fuse/inode.c): within this time after a FORGET a GETATTR means no doubt.
EVICTING_S = 1.0
# The tolerance for S3's times, which are whole seconds of its own clock.
CLOCKS_NS = 5 * SECOND_NS


@dataclass(slots=True, eq=False)
class PendingHead:
    """A HEAD request, under way or `done`; it was sent at `sent` (monotonic seconds).

    `info` is the object, None if a directory has no marker; for a missing file there is an `error`.
    """

    key: str
    work: Work = field(default_factory=Work)
    sent: float = field(default_factory=time.monotonic)
    done: trio.Event = field(default_factory=trio.Event)
    info: ObjectInfo | None = None
    error: StoreError | None = None


@dataclass(slots=True)
class ScanState:
    """The state of HEADs that are sent ahead of a program reading a directory in order.

    `last` is the last name that was looked up, `width` the number of HEADs sent ahead at
    the last step, and `remaining` the number of these whose names have not been looked up yet.
    """

    last: str = ""
    width: int = 0
    remaining: int = 0


class HeadCache:
    """Requests and remembers the attributes of one mount's objects. For the event loop.

    HEADs run in `nursery`. `deferred` returns the attributes of a version that wait to be sent
    to S3, or None.
    """

    def __init__(
        self,
        store: Store,
        directories: Directories,
        inodes: InodeTable,
        owner: Ownership,
        nursery: trio.Nursery,
        deferred: Callable[[ObjectInfo], Meta | None] | None = None,
        notifier: KernelNotifier | None = None,
    ) -> None:
        self._notifier = notifier or KernelNotifier()
        self._store = store
        self._directories = directories
        self._inodes = inodes
        self._owner = owner
        self._nursery = nursery
        self._policy = directories.head_policy
        self.asks_less = self._policy.asks_less
        self._pending: OrderedDict[str, PendingHead] = OrderedDict()
        self._scans: OrderedDict[str, ScanState] = OrderedDict()
        self._deferred = deferred
        # The samples under way, by directory.
        self._sampled: dict[str, PendingHead] = {}
        # Attributes by `_version`, None for the defaults. The kernel forgets names, and looks
        # them up again, more often than attributes change.
        self._remembered: OrderedDict[int, Meta | None] = OrderedDict()
        directories.expect = self.sample_ahead

    def needs_head(self, inode: Inode, assumed: Assumed | None = None) -> bool:
        """True if a HEAD is needed before an inode's attributes are shown.

        `assumed` is what `self.assumed` says of the inode's directory, None to look it up.
        """
        if inode.meta is not None:
            return False
        if inode.parent is None:
            return not self.asks_less and self.lacks(inode)
        assumed = assumed or self.assumed(inode.parent)
        size, modified_ns = (0, 0) if inode.info is None else (inode.info.size, inode.info.mtime_ns)
        is_asked = modified_ns > (assumed.links if 0 < size <= LONGEST_TARGET else assumed.others)
        # `lacks` also sets attributes that wait to be sent, so a writable mount calls it first.
        return is_asked and self.lacks(inode) if self.asks_less else self.lacks(inode) and is_asked

    def assumed(self, directory: Inode) -> Assumed:
        """The Last-Modified up to which a directory's objects are assumed to lack attributes."""
        return self._policy.assumed(self._inodes.key(directory))

    def is_doubted(self, inode: Inode) -> bool:
        """True if the kernel probably repeats a GETATTR because assumed attributes deny access."""
        if not self.asks_less or inode.info is None or not inode.is_current:
            return False
        now = time.monotonic()
        if now < self._inodes.forgotten_at + EVICTING_S or now > inode.shown_until + DOUBT_S:
            return False
        return self.lacks(inode)

    def lacks(self, inode: Inode) -> bool:
        """True if an inode lacks its object's attributes; first set them if they are remembered."""
        if inode.meta is not None or inode.staged is not None:
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
        self._learned(inode, self._remembered[version] or inode.default_meta(self._owner))
        return False

    def meta(self, inode: Inode) -> Meta:
        """An inode's attributes, or the defaults if they are unknown."""
        inode = inode.lead or inode
        if inode.staged is not None:
            return inode.staged.meta
        return inode.meta or inode.default_meta(self._owner)

    async def show(self, inode: Inode) -> None:
        """Request the attributes that stat shows, if needed; a read-only mount ignores errors."""
        if not self.needs_head(inode):
            return
        if inode.parent is not None:
            segment = self._directories.get(self._inodes.key(inode.parent)).holding(inode.name)
            if segment is not None:
                await self.sample(inode.parent, segment, is_listed=False)
        if self.needs_head(inode):
            try:
                await self._learn(inode)
            except StoreError:
                if not self.asks_less:
                    raise
                prefix = names.parent_of(self._inodes.key(inode))
                modified_ns = inode.info.mtime_ns if inode.info is not None else 0
                self._policy.observe(prefix, modified_ns, has_attributes=False)

    async def learn(self, inode: Inode) -> None:
        """Request an inode's attributes if unknown; ESTALE if gone or a symlink shown as a file."""
        was_current = inode.is_current
        if self.lacks(inode):
            try:
                await self._learn(inode)
            except NotFoundError as error:  # the kernel looks the name up again
                raise OSError(errno.ESTALE, "the object is gone") from error
        if was_current and not inode.is_current and inode.info is not None:
            raise OSError(errno.ESTALE, "the name stands for something else now")

    async def _learn(self, inode: Inode) -> None:
        key = self._inodes.key(inode)
        head = self._pending.pop(key, None)
        if head is not None:
            # The answer has to be about the inode's version, and not too old.
            prefix = self._inodes.key(inode.parent) if inode.parent is not None else ""
            is_old = time.monotonic() - head.sent > self._directories.get(prefix).most_s
            known, info = inode.info, head.info
            is_other = known is not None and info is not None and info.etag != known.etag
            changes = self._directories.pending_changes
            is_changed = changes.has_forgotten(prefix, head.sent) or changes.changed_since(
                prefix, inode.name, head.sent
            )
            if is_old or is_other or is_changed or head.error:
                head = None
        self._look_ahead(inode, is_expected=head is not None)
        await self._take(inode, head or self._send(key))

    async def show_all(self, inodes: Sequence[Inode]) -> None:
        """Request the attributes that stat shows for `inodes`; raise a failed HEAD's error."""
        while batch := [inode for inode in inodes if self.needs_head(inode)][:MOST_AHEAD]:
            heads = [self._send(self._inodes.key(inode)) for inode in batch]
            for inode, head in zip(batch, heads, strict=True):
                try:
                    await self._take(inode, head)
                except NotFoundError:
                    inode.meta = inode.default_meta(self._owner)  # the listing has the name

    def wants_sample(self, directory: Inode) -> bool:
        """True if HEADs of a few names in a directory may save the HEADs of its other names."""
        return self._policy.is_undecided(self._inodes.key(directory))

    async def sample(self, directory: Inode, segment: Segment, *, is_listed: bool = True) -> None:
        """Send HEADs of a few names in a directory, and wait for the answers: a sample.

        A sample may save the HEADs of all other names. Unless a program lists the directory
        (`is_listed`), a writable mount sends no sample at the first lookup.
        """
        prefix = self._inodes.key(directory)
        self._send_sample(prefix, segment, is_listed=is_listed)
        sampled = self._sampled.get(prefix)
        if sampled is not None:
            with sampled.work.awaited():
                await sampled.done.wait()

    def sample_ahead(self, prefix: str, segment: Segment) -> None:
        """Start a sample (HEADs) in a directory ahead of a program; per parent, one at a time."""
        has_room = len(self._sampled) * self._policy.sample_size < MOST_AHEAD
        if has_room and names.parent_of(prefix) not in map(names.parent_of, self._sampled):
            self._send_sample(prefix, segment, is_listed=True)

    def _send_sample(self, prefix: str, segment: Segment, *, is_listed: bool) -> None:
        """Start the HEADs of a sample, unless samples of sibling directories decide already."""
        policy = self._policy
        if prefix in self._sampled or not policy.is_undecided(prefix):
            return
        files = [entry for entry in segment.entries.values() if entry is not None]
        times = [info.mtime_ns for info in files]
        folders: list[str] = []
        if not self.asks_less and len(files) < len(segment.entries):
            folders = [f"{prefix}{name}/" for name, entry in segment.entries.items() if not entry]
        if not folders and policy.is_like_others(prefix, times):
            return
        if is_listed or self.asks_less or not policy.is_new(prefix):
            # The smallest file that is not empty, and the youngest; see head_policy.py.
            telling: list[str] = []
            if files:
                smallest = min(files, key=lambda info: info.size or math.inf)
                telling = [smallest.key, max(files, key=lambda info: info.mtime_ns).key]
            ordered = chain(telling, folders, (info.key for info in files))
            keys = list(islice(dict.fromkeys(ordered), SAMPLE))
            self._sampled[prefix] = PendingHead(prefix)
            self._nursery.start_soon(self._run_sample, prefix, keys, times)

    async def _run_sample(self, prefix: str, keys: Sequence[str], modified_ns: list[int]) -> None:
        """Send the first HEADs of a sample, and the others only if attributes are the defaults."""
        sampled, heads = self._sampled[prefix], list[PendingHead]()
        few = self._policy.sample_size
        try:
            for batch in (keys[:few], keys[few:]):
                async with trio.open_nursery() as nursery:
                    for key in batch:
                        heads.append(PendingHead(key, sampled.work))
                        nursery.start_soon(self._run, heads[-1])
                if not self._policy.has_usual(prefix):
                    break
            # A file that was removed tells nothing of the others.
            untold = NotFoundError if self.asks_less else StoreError
            is_known = not any(isinstance(head.error, untold) for head in heads)
            if is_known and self._policy.sampled(prefix, len(heads), modified_ns):
                return
            for head in heads:
                self._keep(head)
        finally:
            self._sampled.pop(prefix).done.set()

    def lacks_version(self, info: ObjectInfo) -> bool:
        """True if `learn_version` should request a version's attributes, and can remember them."""
        has_room = len(self._remembered) < MOST_REMEMBERED
        if not has_room or _version(info) in self._remembered:
            return False
        return not self._policy.has_no_attributes(names.parent_of(info.key), info.mtime_ns)

    async def learn_version(self, info: ObjectInfo) -> None:
        """Request and remember a listed object's attributes before their use; ignore StoreError."""
        try:
            current = await self._store.head(info.key)
        except StoreError:
            return
        known = self._observe(current)
        if _is_same(current, info):
            self._remember(current, known)

    def described(self, info: ObjectInfo) -> None:
        """Remember the attributes in the answer of an object's GET, and show them to the kernel."""
        known = self._observe(info)
        inode = self._inodes.at(info.key)
        if inode is not None and _is_same(info, inode.info) and self.lacks(inode):
            self._learned(inode, known)
            # Not after a GETATTR's own HEAD: the kernel would not believe the answer then.
            if inode.nlookup and inode.meta != inode.default_meta(self._owner):
                self._notifier.invalidate_attributes(inode.nodeid)
        self._remember(info, known)

    def _learned(self, inode: Inode, known: Meta) -> None:
        """Set an inode's attributes; a symlink that the kernel takes for a file gets a new node."""
        was_told = inode.nlookup > 0 and inode.valid_until > 0
        if was_told and known.is_symlink and inode.is_current:
            self._inodes.mark_replaced(inode)
            known = inode.default_meta(self._owner)
        inode.meta = known
        inode.packed = None

    async def _take(self, inode: Inode, head: PendingHead) -> None:
        with head.work.awaited():
            await head.done.wait()
        if not self.lacks(inode):
            return
        if self._inodes.key(inode) != head.key:
            # Renamed meanwhile: the old name may have no object, or another one.
            await self._take(inode, self._send(self._inodes.key(inode)))
            return
        # Of a file that this mount is renaming, S3 may have deleted the old object already.
        may_be_missing = self.asks_less and isinstance(head.error, NotFoundError)
        if head.error is not None and not may_be_missing:
            raise head.error
        # There is no object for a directory without a marker.
        metadata = head.info.metadata if head.info is not None else None
        known = meta.read(metadata or {}, inode.default_meta(self._owner))
        if head.info is not None and _is_same(head.info, inode.info):
            self._remember(head.info, known)
        self._learned(inode, known)

    def _remember(self, info: ObjectInfo, known: Meta) -> None:
        # A young object is not remembered: its time might stay the same after another change.
        if time.time_ns() - info.mtime_ns <= CLOCKS_NS:
            return
        self._remembered[_version(info)] = None if known == self._owner.file else known
        if len(self._remembered) > MOST_REMEMBERED:
            self._remembered.popitem(last=False)

    def _send(self, key: str) -> PendingHead:
        head = PendingHead(key)
        self._nursery.start_soon(self._run, head)
        return head

    async def _run(self, head: PendingHead) -> None:
        try:
            with head.work.doing():
                try:
                    head.info = await self._store.head(head.key)
                except NotFoundError:
                    if not self._store.unanswered.has_undone(head.key, None):
                        raise
                    # A late request has removed the object.
                    await self._store.unanswered.restored(head.key)
                    head.info = await self._store.head(head.key)
            self._observe(head.info)
        except StoreError as error:
            if isinstance(error, NotFoundError) and head.key.endswith("/"):
                self._policy.observe(names.parent_of(head.key), 0, has_attributes=False)
            else:
                head.error = error
        finally:
            head.done.set()

    def _observe(self, info: ObjectInfo) -> Meta:
        """Return an object's attributes, and tell the policy whether the object has any."""
        is_directory = info.key.endswith("/")
        default = self._owner.directory if is_directory else self._owner.file
        known = meta.read(info.metadata or {}, default)
        has_attributes, has_usual = meta.has_attributes_in(info.metadata or {}), False
        if self.asks_less and has_attributes:
            has_usual = self._owner.shown(known) == self._owner.shown(default) and not known.xattrs
            has_attributes = not has_usual
        prefix = names.parent_of(info.key)
        if has_attributes and self.asks_less and not self._policy.has_attributes(prefix):
            directory = self._inodes.at(prefix)
            for child in (directory.children or {}).values() if directory is not None else ():
                if child.nlookup and child.info is not None and child.meta is None:
                    # The kernel got assumed attributes, and has to look the names up again.
                    self._notifier.invalidate_names()
                    break
        modified_ns = 0 if is_directory else info.mtime_ns
        self._policy.observe(
            prefix, modified_ns, has_attributes=has_attributes, has_usual=has_usual
        )
        return known

    # Ahead

    def _look_ahead(self, inode: Inode, *, is_expected: bool) -> None:
        """Send HEADs of the names behind an inode's if a program looks them up in order.

        `is_expected`: the HEAD of this inode's name was sent ahead itself.
        """
        if inode.parent is None:
            return
        prefix = self._inodes.key(inode.parent)
        directory = self._directories.get(prefix)
        segment = directory.holding(inode.name) if directory.most_s else None
        if segment is None or segment.expires <= time.monotonic():
            return
        scan = self._scans.setdefault(prefix, ScanState())
        self._scans.move_to_end(prefix)
        if len(self._scans) > MOST_SCANS:
            self._scans.popitem(last=False)
        behind = segment.after(names.position(inode.name))
        before = segment.ordered[behind - 2] if behind > 1 else scan.last
        is_in_order = is_expected or (bool(scan.last) and before == scan.last)
        scan.last = inode.name
        scan.remaining = max(0, scan.remaining - 1)
        if not is_in_order:
            scan.width = scan.remaining = 0
        elif 2 * scan.remaining <= scan.width:
            most = 0 if self._policy.is_undecided(prefix) else MOST_AHEAD
            scan.width = scan.remaining = min(most, max(1, 2 * scan.width))
            for name in segment.ordered[behind : behind + scan.width]:
                self._send_ahead(inode.parent, prefix, name, segment.entries[name])

    def _send_ahead(self, parent: Inode, prefix: str, name: str, entry: Entry) -> None:
        key = prefix + name if entry is not None else prefix + name + "/"
        known = parent.child(name)
        if key in self._pending or (known is not None and not self.lacks(known)):
            return
        self._keep(self._send(key))

    def _keep(self, head: PendingHead) -> None:
        """Keep a HEAD for a later request; beyond MOST_KEPT, drop the oldest one."""
        self._pending[head.key] = head
        if len(self._pending) > MOST_KEPT:
            self._pending.popitem(last=False)


def _version(info: ObjectInfo) -> int:
    """Hash an object's version; after a change of content or metadata the hash is another."""
    # Whole seconds: some servers list fractions, which a HEAD lacks.
    return hash((info.key, info.etag, info.size, info.mtime_ns // SECOND_NS))


def _is_same(info: ObjectInfo, known: ObjectInfo | None) -> bool:
    return known is not None and _version(info) == _version(known)
