"""A node of the file tree, the staged file of a node that is written, and their attributes."""

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
from fusefs.posix.journal.journal import Journal
from fusefs.posix.nodes.edit_base import EditBase
from fusefs.posix.nodes.object_metadata import NONE_SET, Form, Meta
from fusefs.store.interface import ObjectInfo, UploadState
from fusefs.store.s3.multipart import Upload

# The lock owner of a WRITE or a FLUSH for which the kernel gives none.
UNKNOWN_OWNER = 0


@dataclass(frozen=True, slots=True)
class Ownership:
    """A mount's owner, group and permissions for files and directories whose objects have none.

    With `is_shared` all files belong to the group `gid`, whatever their objects say, and the
    group has the owner's permissions, unless only the owner has any. `file` and `directory` are
    the complete attributes of an object that has none; changed ones are written in `form`.
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
        # Computed once, because a listing shows a thousand entries at a time.
        for name, mode in (
            ("file", stat.S_IFREG | self.file_mode),
            ("directory", stat.S_IFDIR | self.dir_mode),
        ):
            default = Meta(mode, self.uid, self.gid, form=self.form, unset=NONE_SET)
            object.__setattr__(self, name, default)

    def of_new(self, mode: int, uid: int, gid: int) -> Meta:
        """The attributes of a new file or directory with this mode (and type), user and group."""
        return Meta(mode, uid, gid, form=self.form)

    def shown(self, meta: Meta) -> tuple[int, int, int]:
        """The mode, the uid and the gid that programs see for these attributes."""
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
    """The inode of one node id: one name that the kernel knows, in one version of its object.

    `info` is the object version, None for a directory. `is_current` is True while the name stands
    for this node; `children` maps each name in a directory to its current node, None for a file.
    `served` and `passthrough` count the open handles in each mode: one count is always zero, as the
    kernel refuses to mix modes in one inode; `writing` counts those that programs may write to. A
    directory's handles are all served. Its `marks` map positions in its listing to the numbers that
    offsets use for them (offsets.py). An open need not ask the bucket until `valid_until`; the
    kernel may show the attributes until `shown_until` (both in monotonic seconds). `looked_up` is
    True if the kernel has looked the name up since the last open, and the bucket has answered.
    `packed` is the session's own encoding of the attributes.

    `is_removed` is True if this mount removed the file's name, or gave it to another file. Several
    nodes of such a file may be open, in different versions; one of them is the `lead` of the
    others, which show its mode, owner and time. `entries_changed_ns` is the time of this mount's
    last change of a directory's entries, 0 if a program has set the directory's time since.
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
    writing: int = 0
    kernel_file: CacheFile | None = None  # read by the kernel for the passthrough handles
    valid_until: float = 0.0
    shown_until: float = 0.0
    looked_up: bool = False
    is_current: bool = True
    is_removed: bool = False
    lead: Inode | None = None
    # The nodes of the file's hard links; None if there are none, or this name was separated.
    links: LinkedNames | None = None
    entries_changed_ns: int = 0
    # The attributes of the object; None until they are known.
    meta: Meta | None = None
    staged: StagedFile | None = None
    packed: bytes | None = None
    # The kernel's page cache may hold the content from before another client's change was merged.
    has_other_pages: bool = False
    # The ETag of a directory's empty marker; None if no such marker is known.
    marker_etag: str | None = None
    # The generation of the listing that the kernel has read to its end (directory/listings.py).
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
        """Seconds from now for which the kernel may cache the node's attributes."""
        if self.staged is not None or self.is_removed:
            return 0.0
        if self.info is None:
            # A directory always looks the same, and every path leads through the root.
            return math.inf
        return max(0.0, self.shown_until - time.monotonic())

    @property
    def _names(self) -> int:
        return 1 if self.links is None else len(self.links.nodes)

    def log_to(self, log: Journal) -> None:
        parent = self.parent.nodeid if self.parent is not None else 0
        named = self.ino, self.name, self.nlookup
        log.node(self.nodeid, parent, *named, self.info, self.entries_changed_ns)

    def child(self, name: str) -> Inode | None:
        """The node that a name in this directory stands for; None if the kernel knows none."""
        return self.children.get(name) if self.children else None

    def keeps_pages(self) -> bool:
        """Return False, once, if the kernel has to drop the file's cached pages at this open."""
        keeps, self.has_other_pages = not self.has_other_pages, False
        return keeps

    def part_names(self) -> None:
        """Separate this node, whose file is about to change, from the nodes of its hard links."""
        if self.links is not None:
            self.links.part(self)

    def default_meta(self, owner: Ownership) -> Meta:
        """The mount's default attributes, for an object that has none."""
        return owner.directory if self.info is None else owner.file

    def attributes(self, owner: Ownership, mounted_ns: int) -> Attributes:
        """The attributes of stat. S3 has no times of directories, so they get the mount's time."""
        if self.lead is not None and self.info is not None:
            size = self.info.size
            shown = self.lead.attributes(owner, mounted_ns)
            return replace(shown, ino=self.ino, size=size, nlink=0, blocks=-(-size // 512))
        info, staged = self.info, self.staged
        meta = staged.meta if staged is not None else self.meta or self.default_meta(owner)
        mode, uid, gid = owner.shown(meta)
        if staged is not None:
            # The kernel may have written to the file by itself, so its size and time count.
            found = os.fstat(staged.fd)
            # Holes of an edited file stand for the object's bytes: programs must not skip them.
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


# Sets a node's inode number to the given number, or to an unused one for None.
GiveNumber = Callable[[Inode, int | None], None]


class LinkedNames:
    """The nodes of one file's hard links. Belongs to the event loop.

    The bucket has one object for each link, with the same content and attributes. The nodes
    show the same inode number and the same link count: some programs check this after
    link(2) (git, locks by link). The first change of content or attributes through one name
    separates this name from the others, which get another number. A name that the kernel has
    forgotten, or that another client has replaced, becomes a file of its own.

    `give` sets a node's inode number; `changed` is called with each node whose attributes change.
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
        """Replace a name's old node by the new node of the same name and content."""
        self.nodes.discard(old)
        old.links = None
        self.nodes.add(new)
        new.links = self

    def leave(self, inode: Inode) -> None:
        """Remove a node: its name no longer belongs to this file."""
        self.nodes.discard(inode)
        inode.links = None
        self._note_changed()

    def part(self, inode: Inode) -> None:
        """Separate a node that is about to change; all the other nodes get one new number."""
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
    """The state of a staged file; `StagedFile.is_dirty` tells whether an upload is needed.

    OPEN       no close or fsync has promised a program yet that the content is safe
    ABANDONED  like OPEN, but the last program that closed the file was killed
    CLOSED     a close or fsync of a program returned, failed, or waits for the local disk:
               the content is uploaded even if the mount ends
    LEFTOVER   like CLOSED, but from an earlier mount: another client may have replaced the object
    UNLINKED   the name is removed; the content stays for programs that have the file open
    """

    OPEN = enum.auto()
    ABANDONED = enum.auto()
    CLOSED = enum.auto()
    LEFTOVER = enum.auto()
    UNLINKED = enum.auto()


# A global is found faster than an enumeration's member, and each write looks for it.
_UNLINKED = FileState.UNLINKED


@dataclass(slots=True, eq=False)
class StagedFile:
    """A node's local file, which programs write to; the bucket gets its content and attributes.

    Belongs to the event loop. `lock` is held while the file is uploaded, renamed or removed; writes
    wait for it, so that no object is a mix of two contents.

    Upload state: `etag` is the ETag of the bucket's object, None if there is no object. `changes`
    counts the changes of the content, and `uploaded` is its value for the content that the bucket
    has. `meta_changes` counts the changes of mode, owner, times and attributes, also during an
    upload. If the file has only grown since its last upload, its first `kept_size` bytes are the
    object's content; else `kept_size` is None. While a request sends the first `sending` bytes, the
    file may grow; `sent` is the value of `changes` when the last upload began, at `sent_at`. A
    closed file is uploaded `pause_s` seconds after `since`. `begun_ns` is the begin, in ns since
    the epoch, of a multipart upload whose id is not known yet. `tokens` name changes of the object
    that S3 may have executed without an answer (store/fencing.py).

    Origin: `is_anew` is True if programs wrote the whole content, so that it may replace any
    object. Any other content is built on the object with `etag` and replaces no other
    (upload_steps.py). `only_appended` is True if the bytes that the bucket lacks were written with
    O_APPEND; they may be put behind a newer object, and `rebases` counts how often that was done.
    `exclusive`, unless None, marks this file's reservation (exclusive.py): the bucket has not
    decided yet that a file created with O_EXCL is new. `creator` is the process that created a file
    with O_EXCL, 0 if unknown, None without O_EXCL. `is_rewrite` is True if the node stood for an
    object before programs wrote to the file, and `before` has the attributes that this object had,
    or was about to get, at that time. `writers` are the lock owners that wrote what the bucket
    lacks: a process has one for all its descriptors, a forked child another one.

    Disk: `sum` is the content's CRC32, None if unknown (staged_sums.py). `is_named` is True if the
    file's name in the staging directory survives a power cut. `backing` is set if the content was
    taken out of the cache: the kernel may read it for programs, so all handles are passthrough, and
    only writes come here. `may_be_mapped` is True if a program may store into the file unseen,
    through a mapping; `clean` is then the `stamp` of the last content that is known.
    """

    inode: Inode
    path: str
    fd: int
    meta: Meta
    etag: str | None
    exclusive: str | None = None
    creator: int | None = None
    before: Meta | None = None
    # The time (trio's seconds) of the last change of attributes or name.
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
    # A multipart upload on record, which an earlier process may have begun.
    upload_state: UploadState | None = None
    begun_ns: int | None = None
    tokens: set[str] = field(default_factory=set)
    # Programs wrote the content without a gap from its start to this offset.
    written_to: int = 0
    # The charged size in bytes, and the object's part of it, which --staging-size does not count.
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
        """True if a program relies on the content, which is uploaded even if the mount ends."""
        return self.state in (FileState.CLOSED, FileState.LEFTOVER)

    @property
    def is_unlinked(self) -> bool:
        return self.state is _UNLINKED

    def close(self) -> None:
        """Set the state to CLOSED: from now on a program relies on the content."""
        if self.state in (FileState.OPEN, FileState.ABANDONED):
            self.state = FileState.CLOSED

    def begin_sending(self) -> int:
        """Note that the present content is about to be sent; return its size in bytes."""
        self.sent, self.sent_at = self.changes, trio.current_time()
        return self.size()

    def note_unchanged(self, size: int) -> None:
        """Note that the content is the same as the object's, which has `size` bytes."""
        self.uploaded, self.kept_size = self.changes, size

    def mark_uploaded(self, size: int) -> None:
        """Note that S3 has the first `size` bytes; without later changes the file is OPEN again."""
        self.uploaded, self.kept_size = self.sent, size
        if self.is_content_dirty:
            self.since = self.sent_at  # the file has grown meanwhile
            return
        self.writers.clear()
        self.pause_s = 0.0
        self.only_appended = True
        if self.state is not _UNLINKED:
            self.state = FileState.OPEN

    @property
    def appended_from(self) -> int | None:
        """The offset of the appended bytes that S3 lacks; None if it lacks other changes too."""
        if not self.only_appended:
            return None
        return self.kept_size if self.etag is not None else 0

    @property
    def key(self) -> str:
        return self.inode.object.key

    def is_others(self, owner: int) -> bool:
        """True if the bytes that S3 lacks were all written by lock owners other than `owner`."""
        return bool(self.writers and owner) and self.writers.isdisjoint((owner, UNKNOWN_OWNER))

    def check_kept(self) -> None:
        """Raise ESTALE if the file was unstaged, and its descriptor closed, during a wait."""
        if self.inode.staged is not self:
            raise OSError(errno.ESTALE, "the object was replaced while it was edited")

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def stamp(self) -> tuple[int, int]:
        """The content's size (bytes) and modification time (ns); each change alters one of them."""
        found = os.fstat(self.fd)
        return found.st_size, found.st_mtime_ns

    def note_stores(self) -> None:
        """Count a store through a memory mapping as a change: the `stamp` differs from `clean`."""
        if self.may_be_mapped and not self.is_content_dirty and self.stamp() != self.clean:
            self.writers.add(UNKNOWN_OWNER)
            self.only_appended = False
            self.touch()

    def described(self) -> Meta:
        """The attributes to send with an upload, with the content's present modification time."""
        # Other metadata, a digest say, is about the old content.
        other = () if self.is_content_dirty else self.meta.other
        return replace(self.meta, mtime_ns=os.fstat(self.fd).st_mtime_ns, other=other)

    def attributes_alone(self) -> tuple[int, int] | None:
        """The (size, mtime in ns) to record for an object that lacks new attributes, else None."""
        info = self.inode.info
        if not self.is_meta_dirty or info is None or not self.etag or self.etag != info.etag:
            return None
        return info.size, self.object_time(info)

    def object_time(self, info: ObjectInfo) -> int:
        """The modification time (ns) that the object gets if only its attributes are changed."""
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
