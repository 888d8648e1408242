"""The record of a staged file: in an attribute of its content, or in a file beside it.

Most files are small, new, and soon closed. For these a brief record in an extended
attribute is enough: creating and removing a record file would take longer
than all other work for them. The journal has what a brief record lacks, above all the key.

For other files, also closed ones, the attribute holds the full record, so that with
local durability one fsync of the content writes both. A record that is too long for an
attribute, or that has a multipart upload, is a file, which counts in place of the attribute.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import struct
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio

from fusefs.linux.files import closing
from fusefs.posix.nodes.inode import FileState, StagedFile
from fusefs.posix.nodes.object_metadata import Form, Meta

logger = logging.getLogger("fusefs.staging")

# Size and time distinguish two contents only if the file system's clock has ticked in
# between; it ticks every 10 ms at least.
TICK_NS = 20_000_000
# The clock that file systems read, by its number in <linux/time.h>.
CLOCK_REALTIME_COARSE = 5
# The name is short, so that it fits with its value into the inode of ext4.
ATTRIBUTE = "user.fusefs"
# The most bytes that a file system with blocks of 4 KiB takes beside other attributes.
LONGEST = 2048
# The record of a multipart upload has about 100 bytes for each of up to 10,000 parts.
_LONGEST_FILE = 4 << 20
# Stands for an ETag: the bucket is still to decide that the file is new (`If-None-Match: *`).
UNDECIDED = "*"
# A brief record: mode, owner, group; size and time of the content that the bucket has (time 0:
# the bucket has none); the ETag follows.
_BRIEF = struct.Struct("<HIIQQ")
# Flags in the place of the mode's set-id bits: the bucket lacks mode, owner or times; the
# content is built on an object.
_META_DIRTY = 0o2000
_IS_BUILT = 0o4000


def in_attribute(staged: StagedFile) -> bytes | None:
    """A file's record to be put in an attribute; None if too long or with a multipart upload."""
    if staged.upload is not None or staged.upload_state is not None:
        return None
    record = _brief(staged) or full(staged)
    return record if len(record) <= LONGEST else None


def _brief(staged: StagedFile) -> bytes | None:
    """The brief record of a file; None if the file needs a full one."""
    meta = staged.meta
    if (
        staged.state is not FileState.OPEN
        or staged.base is not None
        or staged.begun_ns is not None
        or staged.tokens
        or meta.xattrs
        or meta.other
        or meta.unset
        or meta.form is not Form.S3FS
        or meta.mtime_ns is not None
        or staged.attributes_alone() is not None
        or staged.rebases
    ):
        return None
    size, mtime_ns = _clean_stamp(staged) or (0, 0)
    if mtime_ns < 0:
        return None
    etag = (staged.etag or (UNDECIDED if staged.exclusive is not None else "")).encode()
    mode = meta.mode & ~(_META_DIRTY | _IS_BUILT) | (_META_DIRTY if staged.is_meta_dirty else 0)
    mode |= 0 if staged.is_anew else _IS_BUILT
    return _BRIEF.pack(mode, meta.uid, meta.gid, size, mtime_ns) + etag


def _attribute_of(fd: int) -> dict[str, Any] | None:
    """Read the record in a file's attribute (None: there is none); a brief record's key is None."""
    try:
        brief = os.getxattr(fd, ATTRIBUTE)
    except OSError:
        return None
    # The second byte of a brief record has the type of a regular file: it is 0x80 or more.
    if brief.startswith(b'{"'):
        return dict(json.loads(brief))
    mode, uid, gid, size, mtime_ns = _BRIEF.unpack_from(brief)
    etag = brief[_BRIEF.size :].decode() or None
    return {
        "key": None,
        "etag": etag if etag != UNDECIDED else None,
        "exclusive": UNDECIDED if etag == UNDECIDED else None,
        "metadata": Meta(mode & ~(_META_DIRTY | _IS_BUILT), uid, gid).as_metadata(),
        "is_anew": not mode & _IS_BUILT,
        "is_meta_dirty": bool(mode & _META_DIRTY),
        "uploaded": (size, mtime_ns) if mtime_ns else None,
        **dict.fromkeys(("is_unlinked", "is_closed", "is_leftover", "is_abandoned"), False),
        **dict.fromkeys(("begun_ns", "base", "upload", "attributes")),
    }


def may_tell_uploaded(record: bytes) -> bool:
    """True if a record says, or may say (b"": unknown), that the bucket has the content."""
    if record.startswith(b"{") or not record:
        return b'"uploaded": null' not in record
    return bool(_BRIEF.unpack_from(record)[-1])


def may_tell_appended(record: bytes) -> bool:
    """True if a record says, or may say (b"": unknown), that a file was only appended to."""
    return not record or (record.startswith(b"{") and b'"appended_from": null' not in record)


def _clean_stamp(staged: StagedFile) -> tuple[int, int] | None:
    """(size, mtime) of an uploaded content, if every later change alters the pair; else None."""
    stamp = staged.stamp()
    # If true, a change from now on will show in the file's time.
    is_past = time.time_ns() - stamp[1] > TICK_NS
    return stamp if is_past and not staged.is_content_dirty else None


def full(staged: StagedFile) -> bytes:
    base = staged.base
    state = staged.upload.state if staged.upload is not None else staged.upload_state
    return json.dumps(
        {
            "key": staged.key,
            "etag": staged.etag,
            "exclusive": staged.exclusive,
            "metadata": staged.meta.as_metadata(),
            "is_unlinked": staged.is_unlinked,
            "is_meta_dirty": staged.is_meta_dirty,
            "is_closed": staged.is_closed,
            "is_leftover": staged.state is FileState.LEFTOVER,
            "is_anew": staged.is_anew,
            "rebases": staged.rebases,
            "appended_from": staged.appended_from,
            "attributes": staged.attributes_alone(),
            "is_abandoned": staged.state is FileState.ABANDONED,
            "uploaded": _clean_stamp(staged),
            "begun_ns": staged.begun_ns,
            "tokens": sorted(staged.tokens),
            "base": (*base.version, base.size) if base is not None else None,
            "upload": state.plain() if state is not None else None,
        }
    ).encode()


def write_attribute(fd: int, record: bytes) -> bool:
    """Write a record to the attribute of a content; False if the file system does not take it."""
    try:
        os.setxattr(fd, ATTRIBUTE, record)
    except OSError:
        return False  # the file system has no attributes, or no room for this one
    return True


def write(path: str, record: bytes, *, is_safe: bool = False) -> None:
    """Write a record file, whole or not at all; sync the file if `is_safe`. Blocks.

    After an OSError the old record stays.
    """
    # Several programs may sync one file at once, in a thread each.
    unfinished = path + (f".{threading.get_ident()}.safe" if is_safe else ".new")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, record) < len(record):  # a full disk may take the first blocks
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if is_safe:
            os.fsync(fd)
    except OSError:
        # A later mount would take the unfinished file for one that has to be kept.
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    finally:
        os.close(fd)
    os.rename(unfinished, path + ".json")


def remove(fd: int, path: str) -> None:
    """Remove a content's record, so that mounts ignore the content. Needs no disk space."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{path}.json")
    try:
        os.removexattr(fd, ATTRIBUTE)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise


def is_uploaded(record: Mapping[str, Any], status: os.stat_result) -> bool:
    """True if a record says that the bucket has the content that the local file has now."""
    stamp = status.st_size, status.st_mtime_ns
    return record["uploaded"] is not None and tuple(record["uploaded"]) == stamp


def read(fd: int, path: str) -> dict[str, Any] | None:
    """Read the record of another process's content; None if it has none, ValueError if damaged."""
    try:
        beside = os.open(f"{path}.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return _attribute_of(fd)
    with closing(beside):
        return dict(json.loads(os.read(beside, _LONGEST_FILE)))


def is_recorded(path: Path) -> bool:
    """True if a content has a record, or its attribute can't be read."""
    if path.with_suffix(".json").exists():
        return True
    try:
        os.getxattr(path, ATTRIBUTE)
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.EOPNOTSUPP)
    return True


def remove_unrecorded(path: Path) -> None:
    """Remove a content that has no record, or record files that have no content."""
    if path.exists() and is_recorded(path):
        return
    for name in (path, *path.parent.glob(f"{path.name}.*")):
        name.unlink(missing_ok=True)


def on_record(directory: Path) -> list[Path]:
    """The paths of all contents in a directory, the most recently recorded first."""
    changed: dict[str, int] = {}
    for entry in os.scandir(directory):
        name = os.path.splitext(entry.name)[0]
        if name.isdecimal():
            changed[name] = max(changed.get(name, 0), entry.stat().st_ctime_ns)
    return [directory / name for name in sorted(changed, key=changed.__getitem__, reverse=True)]


async def until_later(staged: StagedFile) -> None:
    """Wait, at most a clock tick, so that a record written next is later than a file's record."""
    last_ns = os.fstat(staged.fd).st_ctime_ns
    with contextlib.suppress(FileNotFoundError):
        last_ns = max(last_ns, os.stat(f"{staged.path}.json").st_ctime_ns)
    for _ in range(TICK_NS // 1_000_000):
        if time.clock_gettime_ns(CLOCK_REALTIME_COARSE) > last_ns:
            return
        await trio.sleep(0.001)


def load(path: Path) -> tuple[int, dict[str, Any]] | None:
    """Open a content and read its record; return both, or None if one of them does not exist.

    The key in a brief record is None. In place of a damaged record file the full record in the
    attribute is read; without one, the content is renamed and kept, and the log says so.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        record = read(fd, str(path))
    except ValueError as error:
        logger.error("the record of a file is damaged (%s): %s", error, path)
        record = _attribute_of(fd)
        if record is None or record["key"] is None:
            kept = path.with_name(f"damaged-{path.name}")
            path.rename(kept)
            logger.error("its content is in %s", kept)
            record = None
    if record is None:
        os.close(fd)
        return None
    return fd, record
