"""The staging directory: local files with contents that the bucket lacks.

    DIRECTORY/source         the bucket to which all files belong
    DIRECTORY/NODEID         the content of a node's file
    DIRECTORY/NODEID.json    its record: key, the bucket's version, mode, owner, upload; mostly
                             an extended attribute of the content instead (staging_record.py)

A record is written before anything relies on it, and whole or not at all, so
that the next process, also after a crash, finds which files have to be uploaded, and
under which keys. A record has no times: the content has those of the local file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.file_cache import FileCache
from fusefs.cache.ranges import RangeMap
from fusefs.linux import files
from fusefs.linux.descriptors import check_unreserved
from fusefs.posix.nodes import object_metadata as meta
from fusefs.posix.nodes.edit_base import EditBase
from fusefs.posix.nodes.inode import UNKNOWN_OWNER, FileState, Inode, StagedFile
from fusefs.posix.nodes.object_metadata import Meta
from fusefs.posix.write import staged_sums, staging_record
from fusefs.store.interface import ObjectInfo, ObjectVersion, UnansweredChanges, UploadState
from fusefs.telemetry.stalls import WaitCause, stage

logger = logging.getLogger("fusefs.staging")


# The largest object of S3.
LARGEST = 5 << 40
# The file that names the bucket.
SOURCE = "source"


class Staging:
    """All staged files of one mount, by node id.

    `source` names the files' bucket; `limit` is the most bytes to hold, and `charged` the number of
    bytes held. `cache` has the objects that are edited. The files' records include the tokens of
    `unanswered` changes. Methods that write to the disk raise OSError if it is full or fails.
    """

    def __init__(
        self,
        directory: Path,
        source: str,
        limit: int | None = None,
        cache: FileCache | None = None,
        unanswered: UnansweredChanges | None = None,
    ) -> None:
        self.directory = directory
        self.source = source
        self.cache = cache
        # Not `or`: an empty table is false.
        self._unanswered = UnansweredChanges() if unanswered is None else unanswered
        self._limit = limit
        self._files: dict[int, StagedFile] = {}
        # Ids of nodes with a file that was made by `prepare`, and not used yet.
        self._prepared: set[int] = set()
        self.charged = 0
        self.syncing = trio.CapacityLimiter(16)
        source_file = directory / SOURCE
        if not source_file.exists() or source_file.read_bytes() != source.encode():
            source_file.write_text(source)  # only if new: the disk may be full by now
        # Locked as long as a process uses the directory.
        self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        files.try_lock(self._lock)
        # True once the directory and the file that names the bucket survive a power cut.
        self._is_findable = False

    def __iter__(self) -> Iterator[StagedFile]:
        return iter(list(self._files.values()))

    def __len__(self) -> int:
        return len(self._files)

    @property
    def pending(self) -> list[StagedFile]:
        """The staged files whose latest content or attributes the bucket lacks."""
        return [staged for staged in self._files.values() if staged.is_dirty]

    @property
    def is_filling(self) -> bool:
        """True if the files hold more than half of the bytes that they may hold."""
        return self._limit is not None and 2 * self.charged > self._limit

    def prepare(self, inode: Inode) -> int:
        """Create an empty file, which `begin` makes a node's content; return its descriptor."""
        check_unreserved()
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path(inode), flags, 0o600)
        self._prepared.add(inode.nodeid)
        return fd

    def move_prepared(self, inode: Inode, new: Inode) -> None:
        """Give the file that was prepared for the node `inode` to the node `new`."""
        os.rename(self._path(inode), self._path(new))
        self._prepared.discard(inode.nodeid)
        self._prepared.add(new.nodeid)

    def edits(self, file: CacheFile) -> bool:
        """True if some staged file is an edit of this cache file."""
        return any(one.base is not None and one.base.file is file for one in self._files.values())

    def discard(self, inode: Inode, fd: int) -> None:
        self._prepared.discard(inode.nodeid)
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(inode))

    def begin(
        self,
        inode: Inode,
        fd: int,
        meta: Meta,
        etag: str | None,
        base: EditBase | None = None,
        taken: CacheFile | None = None,
        *,
        is_exclusive: bool = False,
        is_unlinked: bool = False,
        is_anew: bool = False,
    ) -> StagedFile:
        """Stage a node, with its prepared file `fd` as content; takes over `fd` and the base's pin.

        With `taken`, the content is this cache file instead, which leaves the cache once a record
        is written. `is_exclusive`: the bucket is still to decide that the file is new;
        `is_unlinked`: its name is removed already; `is_anew`: it has no bytes of an object.
        """
        staged = StagedFile(inode, self._path(inode), fd, meta, etag)
        staged.is_anew, staged.only_appended = is_anew, not is_anew
        staged.base = base
        if base is not None:
            base.tokens = staged.tokens
        staged.exclusive = self.mark(inode) if is_exclusive else None
        if is_unlinked:
            staged.state = FileState.UNLINKED
        staged.charged = staged.free = staged.size()
        try:
            self.record(staged)
            if taken is not None:
                assert self.cache is not None
                self.cache.handover.take_out(taken, staged.path)
                self.cache.pin_again(taken)
                staged.backing, staged.clean = taken, staged.stamp()
                staged_sums.forget(staged)  # an earlier staging may have left an old checksum
        except OSError:
            with contextlib.suppress(OSError):
                staging_record.remove(fd, staged.path)
            self.discard(inode, fd)
            raise
        self._add(staged)
        return staged

    def _add(self, staged: StagedFile) -> None:
        self._prepared.discard(staged.inode.nodeid)
        self._files[staged.inode.nodeid] = staged
        staged.inode.staged = staged
        staged.inode.packed = None

    @contextlib.contextmanager
    def another_content(self, staged: StagedFile) -> Iterator[int]:
        """Yield a new file's descriptor, for `replace_content`; remove the file if it is unused."""
        check_unreserved()
        path = f"{staged.path}.next"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def replace_content(
        self, staged: StagedFile, fd: int, info: ObjectInfo, base: EditBase | None
    ) -> None:
        """Replace a file's content by `another_content`: the object `info` plus appended bytes.

        The file gets the attributes of `info`, unless they were changed here. Content and record
        change in one step, as the record is an attribute of the content; after an OSError the file
        is as it was. Takes over the base's pin.
        """
        if staged.has_record_file:
            record = staging_record.in_attribute(staged) or b""
            _write_attribute(staged.fd, record)
            os.unlink(f"{staged.path}.json")
            staged.has_record_file, staged.recorded = False, record
        before = staged.etag, staged.kept_size, staged.base, staged.rebases, staged.meta
        staged.etag, staged.kept_size = info.etag, info.size
        if not staged.is_meta_dirty:
            staged.meta = meta.read(info.metadata or {}, staged.meta).changed(mtime_ns=None)
        staged.rebases += 1
        staged.base = base
        record = staging_record.in_attribute(staged) or b""
        try:
            _write_attribute(fd, record)
            os.rename(f"{staged.path}.next", staged.path)
        except OSError:
            staged.etag, staged.kept_size, staged.base, staged.rebases, staged.meta = before
            raise
        os.dup2(fd, staged.fd, inheritable=False)
        staged.recorded, staged.sum = record, None
        staged.charged += info.size - staged.free
        staged.free = info.size
        staged.written_to = 0
        staged.inode.has_other_pages = True
        if base is not None:
            base.tokens = staged.tokens
        if before[2] is not None and self.cache is not None:
            self.cache.unpin(before[2].file)
        if not record:  # the record is too long for an attribute
            self.try_record(staged)

    def rebase(self, base: EditBase, version: ObjectVersion) -> None:
        """Make the uploaded version the new base of an edited file."""
        if self.cache is not None:
            old, base.file = base.file, self.cache.pin(version)
            self.cache.unpin(old)
            base.size, base.changed = version.size, RangeMap()

    def drop_base(self, staged: StagedFile) -> None:
        if staged.base is not None and self.cache is not None:
            self.cache.unpin(staged.base.file)
        staged.base = None

    def charge(self, staged: StagedFile, size: int) -> None:
        """Count a file as `size` bytes before it grows; ENOSPC over `limit`, EFBIG over LARGEST."""
        if size > LARGEST:
            raise OSError(errno.EFBIG, "no object is larger than 5 TiB")
        more = size - staged.charged
        if more > 0 and self._limit is not None and self.charged + more > self._limit:
            raise OSError(errno.ENOSPC, "more than --staging-size waits for upload")
        self.charged += more
        staged.charged = size

    def record(self, staged: StagedFile) -> None:
        """Write a file's record, if it has changed; blocks for as long as creating a file does."""
        staged.tokens.update(self._unanswered.tokens(staged.key))
        if self._record_in_attribute(staged):
            return
        record = staging_record.full(staged)
        if record != staged.recorded or not staged.has_record_file:
            staging_record.write(staged.path, record)
            staged.has_record_file = True
            staged.recorded = record

    def try_record(self, staged: StagedFile) -> None:
        """Call `record`, but only log an OSError: the old record stays then."""
        try:
            self.record(staged)
        except OSError as error:
            logger.warning("the record of %s is an old one: %s", staged.key, error.strerror)

    def _record_in_attribute(self, staged: StagedFile) -> bool:
        """Write a file's record to its attribute; False if the record needs a file of its own."""
        record = None if staged.has_record_file else staging_record.in_attribute(staged)
        if record is None:
            return False
        if record != staged.recorded and not staging_record.write_attribute(staged.fd, record):
            return False
        staged.recorded = record
        return True

    def close(self, staged: StagedFile) -> None:
        """Set a file's state to CLOSED, as a program relies on its content; then `try_record`."""
        staged.close()
        self.try_record(staged)

    def note_edited(self, staged: StagedFile) -> None:
        """Record that a file is about to be changed by more than appending."""
        staged.only_appended = False
        if staging_record.may_tell_appended(staged.recorded):
            self.record(staged)

    def unlink(self, staged: StagedFile) -> None:
        """Record that a file's name is removed, so that no process uploads the file any more.

        On a full disk the record is removed instead: if this process dies, the programs that
        have the file open lose its content.
        """
        staged.state = FileState.UNLINKED
        try:
            self.record(staged)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            logger.warning("the record of %s is removed: %s", staged.path, error.strerror)
            staging_record.remove(staged.fd, staged.path)
            staged.has_record_file, staged.recorded = False, b""

    async def make_safe(self, staged: StagedFile) -> None:
        """Set a file's state to CLOSED; make content and record safe against a power cut."""
        staged.close()
        staged.tokens.update(self._unanswered.tokens(staged.key))
        # The file may be uploaded, and released, while this waits for the disk.
        with files.closing(os.dup(staged.fd)) as fd:
            while True:
                has_file = not self._record_in_attribute(staged)
                record = staging_record.full(staged) if has_file else staged.recorded
                sync = partial(self._sync, staged, fd, record if has_file else None)
                with stage(WaitCause.CACHE_DISK):
                    await trio.to_thread.run_sync(sync, limiter=self.syncing)
                now = staged.inode.staged
                if now is not staged:
                    break
                if has_file:
                    staged.has_record_file = True
                    staged.recorded = record
                    if staging_record.full(staged) == record:
                        return
                elif staged.recorded == record:
                    return
        if not has_file:
            return
        # The file was released meanwhile, so the record that was just written has no file.
        if now is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{staged.path}.json")
        else:
            now.recorded = b""
            now.has_record_file = True
            self.record(now)

    def mark(self, inode: Inode) -> str:
        """The text that marks a file's reservation; no other file of any mount has the same."""
        return f"{self.directory.name}-{inode.nodeid}"

    def _path(self, inode: Inode) -> str:
        return f"{self.directory}/{inode.nodeid}"

    def _sync(self, staged: StagedFile, fd: int, record: bytes | None) -> None:
        """Sync a content and its name; write `record` to a file, unless it is None. Blocks."""
        os.fsync(fd)
        if record is not None:
            staging_record.write(staged.path, record, is_safe=True)
        elif staged.is_named:
            return
        self.sync_names()
        staged.is_named = True

    def sync_names(self) -> None:
        """Make all names that the directory has now safe against a power cut. Blocks.

        The first call also makes safe what recovery needs to find the directory: its path, and
        the file that names the bucket. Several threads may call this at once.
        """
        if self._is_findable:
            files.sync(self.directory)
            return
        files.sync(self.directory / SOURCE)
        files.sync_directory(str(self.directory))
        self._is_findable = True

    def restore(self, inode: Inode) -> StagedFile | None:
        """Restore the file that an earlier process staged for a node; None if there is none."""
        path = self.directory / str(inode.nodeid)
        loaded = staging_record.load(path)
        if loaded is None:
            # The uploaded content had become the cached copy, or no program knew of the file.
            staging_record.remove_unrecorded(path)
            return None
        return self.take_up(inode, *loaded)

    def take_up(self, inode: Inode, fd: int, record: Mapping[str, Any]) -> StagedFile:
        """Stage a node with an earlier process's content, open as `fd`, and its record."""
        known = meta.read(record["metadata"], meta.process_default()).changed(mtime_ns=None)
        staged = StagedFile(inode, self._path(inode), fd, known, record["etag"])
        if record["is_unlinked"]:
            staged.state = FileState.UNLINKED
        elif record["is_closed"]:
            staged.state = FileState.LEFTOVER if record["is_leftover"] else FileState.CLOSED
        elif record.get("is_abandoned"):
            staged.state = FileState.ABANDONED
        staged.is_meta_dirty = record["is_meta_dirty"]
        staged.sum = staged_sums.recall(fd)
        staged.is_rewrite = record["etag"] is not None
        staged.begun_ns = record["begun_ns"]
        mark = record.get("exclusive")
        staged.exclusive = self.mark(inode) if mark == staging_record.UNDECIDED else mark
        staged.is_anew = record.get("is_anew", True)  # records of earlier versions lack it
        staged.rebases = record.get("rebases", 0)
        if record["uploaded"] and tuple(record["uploaded"]) == staged.stamp():
            staged.uploaded, staged.kept_size = staged.changes, staged.size()
        elif staged.size():
            staged.writers.add(UNKNOWN_OWNER)
            staged.kept_size = record.get("appended_from")
            staged.only_appended = staged.kept_size is not None
        if record["upload"] is not None:
            staged.upload_state = UploadState.from_plain(record["upload"])
        staged.tokens.update(record.get("tokens", ()))  # records of earlier versions lack them
        staged.has_record_file = os.path.exists(f"{staged.path}.json")
        # The record's time tells how long the file has been waiting.
        staged.since -= max(0.0, time.time() - os.fstat(fd).st_ctime)
        staged.charged = staged.free = staged.size()
        if record["base"] is not None and self.cache is not None:
            key, etag, size, kept = record["base"]
            staged.base = EditBase(self.cache.pin(ObjectVersion(key, etag, size)), kept)
            staged.base.recover(fd, 0, staged.size())
            staged.base.tokens = staged.tokens
        staged.tokens.update(self._unanswered.tokens(staged.key))
        self._add(staged)
        return staged

    def on_disk(self) -> list[int]:
        """The ids of nodes for which an earlier process of this mount staged a file."""
        return [int(path.name) for path in staging_record.on_record(self.directory)]

    def set_aside(self, staged: StagedFile) -> Path:
        """Unstage a file, but keep its content; return the new path, which mounts ignore."""
        kept = self.directory / f"edited-{staged.inode.nodeid}"
        os.rename(staged.path, kept)
        self.release(staged)
        return kept

    def release(self, staged: StagedFile, *, is_taken: bool = False) -> None:
        """Unstage a file; remove its record, and its content unless `is_taken` by the cache."""
        del self._files[staged.inode.nodeid]
        self.charged -= staged.charged - staged.free
        self.drop_base(staged)
        if staged.backing is not None and self.cache is not None:
            self.cache.unpin(staged.backing)
        staged.inode.staged = None
        staged.inode.packed = None
        try:
            os.close(staged.fd)
            if not is_taken:
                Path(staged.path).unlink(missing_ok=True)
            if staged.has_record_file:
                Path(f"{staged.path}.json").unlink(missing_ok=True)
        except OSError as error:  # the disk fails; the next mount finds the file
            logger.warning("%s is left on the local disk: %s", staged.path, error.strerror)

    def remove_if_empty(self) -> None:
        """Remove the staging directory after the mount's end, unless the next mount needs it."""
        if self._files:
            return
        try:
            for path in staging_record.on_record(self.directory):
                if int(path.name) not in self._prepared and not staging_record.is_recorded(path):
                    logger.warning("%s is on no record, and is removed", path)
                    staging_record.remove_unrecorded(path)
            if remaining := sorted(set(os.listdir(self.directory)) - {SOURCE}):
                logger.warning("%s is kept for the next mount: %s", self.directory, remaining)
                return
            (self.directory / SOURCE).unlink(missing_ok=True)
            self.directory.rmdir()
        except OSError as error:
            logger.warning("%s is kept: %s", self.directory, error.strerror)


def _write_attribute(fd: int, record: bytes) -> None:
    """Write a record to the attribute of a content; OSError if it is empty or does not fit."""
    if not record or not staging_record.write_attribute(fd, record):
        raise OSError(errno.ENOTSUP, "its record is in no attribute")
