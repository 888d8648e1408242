"""One node of the tree, the file that is written under it, and what stat shows of both."""

from __future__ import annotations

import enum
import errno
import math
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.posix.nodes.edit_base import EditBase
from fusefs.posix.nodes.object_metadata import NONE_SET, Form, Meta
from fusefs.store.interface import ObjectInfo, UploadState
from fusefs.store.s3.multipart import Upload

# Whose a WRITE or a FLUSH is where the kernel does not say.
UNKNOWN_OWNER = 0
# Below are the root and the offsets of "." and ".." in directory streams.
FIRST_ID = 16


@dataclass(frozen=True, slots=True)
class Ownership:
    """A mount's way of looking at the bucket: who owns what has no owner, with which permissions.

    With `is_shared` everything belongs to the group `gid`, whatever its object says, and the
    group may do with it what its owner may, unless it is the owner's alone. `file` and
    `directory` are the attributes of each where its object has none, to be written in `form`.
    """

    uid: int
    gid: int
    file_mode: int
    dir_mode: int
    is_shared: bool = False
    form: Form = Form.S3FS
    file: Meta = field(init=False)
    directory: Meta = field(init=False)

    def __post_init__(self) -> None:
        # Made once, for a listing shows a thousand at a time.
        for name, mode in (
            ("file", stat.S_IFREG | self.file_mode),
            ("directory", stat.S_IFDIR | self.dir_mode),
        ):
            default = Meta(mode, self.uid, self.gid, form=self.form, unset=NONE_SET)
            object.__setattr__(self, name, default)

    def of_new(self, mode: int, uid: int, gid: int) -> Meta:
        """The attributes of what a process of this user and group makes with this mode."""
        return Meta(mode, uid, gid, form=self.form)

    def shown(self, meta: Meta) -> tuple[int, int, int]:
        """The mode, the uid and the gid that programs see of what has these attributes."""
        mode, uid, gid = meta.mode, meta.uid, meta.gid
        if meta.unset:
            default = self.directory if stat.S_ISDIR(mode) else self.file
            mode = default.mode if "mode" in meta.unset else mode
            uid = default.uid if "uid" in meta.unset else uid
            gid = default.gid if "gid" in meta.unset else gid
        if self.is_shared:
            gid = self.gid
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                mode |= (mode & stat.S_IRWXU) >> 3
        return mode, uid, gid


@dataclass(slots=True)
class Attributes:
    """The attributes of stat: `size` in bytes, `blocks` of 512, `mtime_ns` since the epoch."""

    ino: int
    size: int
    mtime_ns: int
    mode: int
    nlink: int
    uid: int
    gid: int
    blocks: int


@dataclass(slots=True, eq=False, repr=False)
class Inode:
    """One node id: there are as many as names that the kernel knows.

    `info` is the object version (None for a directory); `children` holds the
    current inode of each name (None for a file). `served` and `passthrough`
    count the open handles in each mode: one of them is always zero, because
    the kernel refuses to mix them in one inode. A directory's are all served,
    and `marks` are the positions that the offsets of its entries refer to, with their
    numbers (offsets.py). Until `valid_until` it is relied on to be what its name stands for, and
    until `shown_until` the kernel shows its attributes, in seconds of the monotonic clock;
    `looked_up` says that the kernel looked the name up since the last open, and the bucket told
    what it stands for. `packed` is the session's own form of the attributes.

    `is_removed` says that a file's name was taken from it here. Of the nodes
    that were one file by then, and may be open in different versions, one
    stands for the file: the others have it as `lead`, and show its mode,
    owner and time. `entries_changed_ns` is when this mount last changed a
    directory's entries, 0 if it has not since the time was set.
    """

    nodeid: int
    ino: int
    parent: Inode | None
    name: str
    info: ObjectInfo | None
    children: dict[str, Inode] | None = None
    marks: dict[str, int] | None = None
    nlookup: int = 0
    served: int = 0
    passthrough: int = 0
    valid_until: float = 0.0
    shown_until: float = 0.0
    looked_up: bool = False
    is_current: bool = True
    is_removed: bool = False
    lead: Inode | None = None
    # Its other names, where hard links have made some that are not parted yet.
    links: LinkedNames | None = None
    entries_changed_ns: int = 0
    # The attributes of its object, on a writable mount; None until they are known.
    meta: Meta | None = None
    staged: StagedFile | None = None
    packed: bytes | None = None
    # The kernel may have pages of what the file was before another node's change went in.
    has_other_pages: bool = False
    # Of a directory that is known to have a marker without content: the marker's.
    marker_etag: str | None = None
    # The state of the listing that the kernel has read to its end (directory/listings.py).
    streamed_generation: int = -1

    def __post_init__(self) -> None:
        if self.info is None:
            self.children = {}

    @property
    def object(self) -> ObjectInfo:
        """The object version that a file's node stands for."""
        assert self.info is not None
        return self.info

    @property
    def is_open(self) -> bool:
        return bool(self.served or self.passthrough)

    @property
    def valid_s(self) -> float:
        """Seconds for which the kernel may believe the attributes of this version."""
        if self.staged is not None or self.is_removed:
            return 0.0
        if self.info is None:
            # A directory always looks the same, and every path leads through the root.
            return math.inf
        return max(0.0, self.shown_until - time.monotonic())

    @property
    def _names(self) -> int:
        return 1 if self.links is None else len(self.links.nodes)

    def child(self, name: str) -> Inode | None:
        """The current node of a name in this directory, if the kernel knows it."""
        return self.children.get(name) if self.children else None

    def keeps_pages(self) -> bool:
        """True if the kernel may keep its pages at an open for reads; else it drops them then."""
        keeps, self.has_other_pages = not self.has_other_pages, False
        return keeps

    def part_names(self) -> None:
        """Part this name from the other names of its file, which is about to change."""
        if self.links is not None:
            self.links.part(self)

    def default_meta(self, owner: Ownership) -> Meta:
        """Its attributes where the object has none."""
        return owner.directory if self.info is None else owner.file

    def attributes(self, owner: Ownership, mounted_ns: int) -> Attributes:
        """The attributes of stat; a directory is as old as the mount: S3 keeps no time of it."""
        if self.lead is not None and self.info is not None:
            size = self.info.size
            shown = self.lead.attributes(owner, mounted_ns)
            return replace(shown, ino=self.ino, size=size, nlink=0, blocks=-(-size // 512))
        info, staged = self.info, self.staged
        meta = staged.meta if staged is not None else self.meta or self.default_meta(owner)
        mode, uid, gid = owner.shown(meta)
        if staged is not None:
            # The kernel may have written by itself: what the file says is the truth.
            found = os.fstat(staged.fd)
            # Holes of a file that is edited are the object's bytes, and not to be skipped.
            blocks = found.st_blocks if staged.base is None else -(-found.st_size // 512)
            size, mtime_ns = found.st_size, found.st_mtime_ns
            nlink = 0 if staged.is_unlinked else self._names
            return Attributes(self.ino, size, mtime_ns, mode, nlink, uid, gid, blocks)
        if info is None:
            size, mtime_ns, nlink = 4096, mounted_ns, 2
        else:
            size, mtime_ns, nlink = info.size, info.mtime_ns, 0 if self.is_removed else self._names
        if self.entries_changed_ns:
            mtime_ns = self.entries_changed_ns
        elif meta.mtime_ns is not None:
            mtime_ns = meta.mtime_ns
        return Attributes(self.ino, size, mtime_ns, mode, nlink, uid, gid, -(-size // 512))


# Called with a node whose name is to have the number that is given, or (None) any other.
GiveNumber = Callable[[Inode, int | None], None]


class LinkedNames:
    """The nodes of the names that a hard link has made one file's. Belongs to the event loop.

    A bucket has an object for each, with the same content and attributes. So they show
    one inode number and count each other as links, as programs expect that look after
    they have made a link (git, locks by link). The first change through one of them,
    of content or attributes, parts it from the others: they get another number. What the
    kernel has forgotten of such a file, or somebody else has replaced, is a file by itself.

    `give` gives a node another number; `changed` is called with each that looks different now.
    """

    __slots__ = ("_changed", "_give", "nodes")

    def __init__(
        self, nodes: Iterable[Inode], give: GiveNumber, changed: Callable[[Inode], None]
    ) -> None:
        self.nodes = set(nodes)
        self._give = give
        self._changed = changed
        for inode in self.nodes:
            inode.links = self

    def add(self, inode: Inode) -> None:
        inode.links = self
        self.nodes.add(inode)
        self._note_changed()

    def replace(self, old: Inode, new: Inode) -> None:
        """A name has another node, of the same content."""
        self.nodes.discard(old)
        old.links = None
        self.nodes.add(new)
        new.links = self

    def leave(self, inode: Inode) -> None:
        """A name is not the file's any more."""
        self.nodes.discard(inode)
        inode.links = None
        self._note_changed()

    def part(self, inode: Inode) -> None:
        """A file changes under one of its names, which keeps the number."""
        self.leave(inode)
        self._changed(inode)
        number = None
        for other in self.nodes:
            self._give(other, number)
            number = other.ino

    def _note_changed(self) -> None:
        for inode in self.nodes:
            self._changed(inode)
        if len(self.nodes) == 1:
            (last,) = self.nodes
            last.links = None


class FileState(enum.Enum):
    """The stage of a staged file's life; what the bucket lacks of it is counted apart.

    OPEN       no program was promised yet that its content is kept
    ABANDONED  as OPEN, and the last program that stopped writing to it was killed
    CLOSED     a program was promised, or waited for, its content to be kept:
               it is uploaded whatever happens to the mount
    LEFTOVER   as CLOSED, by an earlier mount: another client may have been faster
    UNLINKED   its name is gone; the content is for programs that have it open
    """

    OPEN = enum.auto()
    ABANDONED = enum.auto()
    CLOSED = enum.auto()
    LEFTOVER = enum.auto()
    UNLINKED = enum.auto()


# A class's attribute takes longer to find, and each write looks for it.
_UNLINKED = FileState.UNLINKED


@dataclass(slots=True, eq=False)
class StagedFile:
    """One file that is written. Belongs to the event loop.

    `etag` is that of the object that the bucket has under the key, None if it
    has none. `changes` counts what was done to the content, and `uploaded` is
    what it was when the bucket got it; `meta_changes` counts what was done to
    mode, owner, times and attributes, also during an upload. `lock` is held while the file is
    uploaded, renamed or removed; writes wait for it, so that no object is a mix.

    `exclusive` is set while the bucket has not decided yet that a file created
    with O_EXCL is new: it marks this file's reservation (exclusive.py).
    `creator` is the process that created it so, 0 if that is not known, None if it was not.
    `is_rewrite` says that its node stood for an object before it was written to.
    `before` are the attributes that the object had, or was to have, when it was opened to be
    rewritten. `begun_ns` is when an upload in parts was begun whose id is not known yet,
    in ns since the epoch. `tokens` are those of changes of its object that may have been
    executed without an answer (store/fencing.py). `sum` is the
    content's CRC32, None if it is not known (staged_sums.py). `kept_size` is how much of the
    content is all that the bucket has, None if the file has not merely grown since.
    `is_anew`: its programs have made all of it, so that it takes the place of whatever the bucket
    has; any other content is built on the object with `etag`, and on no other (upload_steps.py).
    `only_appended`: what the bucket lacks was written with O_APPEND, and may go behind another
    object: `rebases` is how often it did. `pause_s` is
    how long after `since` it is to be uploaded, closed as it is. While a request has its first
    `sending` bytes as its body it may grow; `sent` is what `changes` was then, at `sent_at`.
    `writers` are those that have written what the bucket lacks, as lock owners: a process has
    one for all its descriptors, a forked child another one. `is_named`: a power cut
    leaves the file its name in the staging directory.

    `backing` is set where the content is a cache file that was taken out: the kernel may read
    it for programs, so all that open it get it by passthrough, and only what they write comes
    here. `may_be_mapped`: a program may have mapped it so that it can store into it, unseen;
    `clean` is then the `stamp` of what is known of the content.
    """

    inode: Inode
    path: str
    fd: int
    meta: Meta
    etag: str | None
    exclusive: str | None = None
    creator: int | None = None
    before: Meta | None = None
    # When its attributes or its name changed last, in trio's seconds.
    described_at: float = 0.0
    changes: int = 1
    uploaded: int = 0
    writers: set[int] = field(default_factory=set)
    kept_size: int | None = None
    is_anew: bool = False
    only_appended: bool = True
    rebases: int = 0
    pause_s: float = 0.0
    sending: int | None = None
    sent: int = 0
    sent_at: float = 0.0
    is_meta_dirty: bool = False
    meta_changes: int = 0
    is_rewrite: bool = False
    state: FileState = FileState.OPEN
    # The error of the last upload.
    error: Exception | None = None
    upload: Upload | None = None
    # An upload that is on record, and perhaps an earlier process's.
    upload_state: UploadState | None = None
    begun_ns: int | None = None
    tokens: set[str] = field(default_factory=set)
    # How far the content was written from its start on without a gap.
    written_to: int = 0
    # The bytes that count as held, and those of them that are the object's.
    charged: int = 0
    free: int = 0
    base: EditBase | None = None
    backing: CacheFile | None = None
    may_be_mapped: bool = False
    clean: tuple[int, int] | None = None
    recorded: bytes = b""
    sum: int | None = None
    has_record_file: bool = False
    is_named: bool = False
    since: float = field(default_factory=trio.current_time)
    lock: trio.Lock = field(default_factory=trio.Lock)

    @property
    def is_content_dirty(self) -> bool:
        return self.changes != self.uploaded

    @property
    def is_dirty(self) -> bool:
        return (self.changes != self.uploaded or self.is_meta_dirty) and self.state is not _UNLINKED

    @property
    def is_closed(self) -> bool:
        """True if its content is uploaded whatever happens to the mount."""
        return self.state in (FileState.CLOSED, FileState.LEFTOVER)

    @property
    def is_unlinked(self) -> bool:
        return self.state is _UNLINKED

    def close(self) -> None:
        """A program relies on its content from now on."""
        if self.state in (FileState.OPEN, FileState.ABANDONED):
            self.state = FileState.CLOSED

    def begin_sending(self) -> int:
        """Note that the present content is about to be sent; return its size."""
        self.sent, self.sent_at = self.changes, trio.current_time()
        return self.size()

    def note_unchanged(self, size: int) -> None:
        """The content is that of the bucket's object, of `size` bytes."""
        self.uploaded, self.kept_size = self.changes, size

    def mark_uploaded(self, size: int) -> None:
        """The bucket has its first `size` bytes as sent; later ones were promised to no program."""
        self.uploaded, self.kept_size = self.sent, size
        if self.is_content_dirty:
            self.since = self.sent_at  # it has grown meanwhile
            return
        self.writers.clear()
        self.pause_s = 0.0
        self.only_appended = True
        if self.state is not _UNLINKED:
            self.state = FileState.OPEN

    @property
    def appended_from(self) -> int | None:
        """The offset behind which all is that the bucket lacks; None if it lacks more."""
        if not self.only_appended:
            return None
        return self.kept_size if self.etag is not None else 0

    @property
    def key(self) -> str:
        return self.inode.object.key

    def is_others(self, owner: int) -> bool:
        """True if lock owners other than this one have written all that the bucket lacks."""
        return bool(self.writers and owner) and self.writers.isdisjoint((owner, UNKNOWN_OWNER))

    def check_kept(self) -> None:
        """Raise ESTALE if what was waited for has set the file aside, and closed its descriptor."""
        if self.inode.staged is not self:
            raise OSError(errno.ESTALE, "the object was replaced while it was edited")

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def stamp(self) -> tuple[int, int]:
        """The stamp that tells this content from later ones: its size, and its time in ns."""
        found = os.fstat(self.fd)
        return found.st_size, found.st_mtime_ns

    def note_stores(self) -> None:
        """See what programs have stored through mappings: of that the file alone tells."""
        if self.may_be_mapped and not self.is_content_dirty and self.stamp() != self.clean:
            self.writers.add(UNKNOWN_OWNER)
            self.only_appended = False
            self.touch()

    def described(self) -> Meta:
        """The attributes of the content as it is now, with its time."""
        # What others have noted there, a digest say, is about another content.
        other = () if self.is_content_dirty else self.meta.other
        return replace(self.meta, mtime_ns=os.fstat(self.fd).st_mtime_ns, other=other)

    def attributes_alone(self) -> tuple[int, int] | None:
        """Size and time (ns) of the object that lacks changed attributes; None for none."""
        info = self.inode.info
        if not self.is_meta_dirty or info is None or not self.etag or self.etag != info.etag:
            return None
        return info.size, self.object_time(info)

    def object_time(self, info: ObjectInfo) -> int:
        """The time that the object is to have if the content does not replace it."""
        if not self.is_content_dirty:
            return os.fstat(self.fd).st_mtime_ns
        known = self.before.mtime_ns if self.before is not None else None
        return info.mtime_ns if known is None else known  # a copy has a time of its own

    def touch(self) -> None:
        self.inode.part_names()
        if not self.is_dirty:
            self.since = trio.current_time()
        self.changes += 1
        self.sum = None

    def touch_meta(self) -> None:
        self.inode.part_names()
        self.described_at = trio.current_time()
        if not self.is_dirty:
            self.since = self.described_at
        self.is_meta_dirty = True
        self.meta_changes += 1
