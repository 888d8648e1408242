"""What earlier mounts have left to be uploaded: found at the start, and brought to its end.

A mount that ended before the bucket had everything leaves its staging
directory behind (posix/write/staging.py). A file that a program had
closed, or was closing, is staged again under its name and uploaded; where
another client has replaced the object meanwhile, it is uploaded beside it. What
no program had closed yet, a file that a power cut has torn, say, is left where it
is, and the log says where.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from pathlib import Path

from fusefs.linux.files import try_lock
from fusefs.posix.directory.segment import ABSENT
from fusefs.posix.metadata import attribute_log, object_metadata
from fusefs.posix.metadata.object_metadata import Meta
from fusefs.posix.namespace import removals
from fusefs.posix.nodes import names
from fusefs.posix.nodes.inode import FileState, Inode
from fusefs.posix.write.staging_record import load, on_record
from fusefs.posix.write.writer import Writer
from fusefs.store.interface import ObjectInfo

logger = logging.getLogger("fusefs.leftovers")


def adopt(writer: Writer) -> int:
    """Stage again what earlier mounts of the same bucket have left; return how many files."""
    own = writer.staging.directory
    count = 0
    # The youngest first: what it has of a name is the last that was written to it.
    for directory in sorted(own.parent.iterdir(), key=lambda path: path.name, reverse=True):
        if directory != own and directory.is_dir():
            count += _adopt_directory(writer, directory)
    return count


def _adopt_directory(writer: Writer, directory: Path) -> int:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Else it belongs to a mount that is out of sight and still being ended.
        if not try_lock(fd) or not _is_ours(directory, writer.staging.source):
            return 0
        count = 0
        for path in on_record(directory):
            count += adopt_file(writer, path)
        adopt_attributes(writer, directory)
        (directory / attribute_log.NAME).unlink(missing_ok=True)
        if writer.may_delete and adopt_removals(writer, directory):
            (directory / removals.NAME).unlink(missing_ok=True)
        _remove(directory)
        return count
    finally:
        os.close(fd)


def adopt_attributes(writer: Writer, directory: Path) -> None:
    """Take up the attributes that an earlier process was to send. Blocks."""
    default = Meta(stat.S_IFREG | 0o644, os.geteuid(), os.getegid())
    for record in attribute_log.load(directory):
        if record.info.key.startswith(writer.inodes.prefix):
            writer.deferred.adopt(record, object_metadata.read(record.metadata, default))


def adopt_removals(writer: Writer, directory: Path) -> bool:
    """Have objects deleted that an earlier process was to delete. Blocks.

    False if some of them are on record in `directory` alone.
    """
    is_on_record = directory == writer.staging.directory
    try:
        for key, etag, removed_ns in removals.load(directory):
            writer.removals.adopt(key, etag, removed_ns, is_on_record=is_on_record)
            writer.deferred.drop(key)
            prefix = key[: key.rfind("/") + 1]
            writer.directories.changed(prefix, key[len(prefix) :], ABSENT)
    except OSError as error:
        logger.warning("%s has removals for a later mount: %s", directory, error.strerror)
        return False
    return True


def restore(writer: Writer, inode: Inode) -> None:
    """Take up what an earlier process had staged under a node."""
    staged = writer.staging.restore(inode)
    if staged is None:
        return
    if staged.is_unlinked:
        if inode.is_current:
            writer.inodes.supersede(inode)
        state = staged.upload_state.plain() if staged.upload_state is not None else None
        writer.uploads.abort_later(staged.key, state, staged.begun_ns)
        staged.upload_state = staged.begun_ns = None
    else:
        writer.flusher.list_staged(inode)
        if staged.exclusive is not None:
            writer.exclusive.watch(staged)


def let_go_unlinked(writer: Writer) -> None:
    """Forget what an earlier process had unlinked, and no program has open."""
    for staged in writer.staging:
        if staged.is_unlinked and not staged.inode.served:
            staged.inode.meta = staged.described()
            writer.staging.release(staged)


def _is_ours(directory: Path, source: str) -> bool:
    try:
        found = (directory / "source").read_text(errors="replace")
    except FileNotFoundError:
        return False
    if found != source:
        logger.warning("%s has files that wait to be uploaded to %s", directory, found)
    return found == source


def _remove(directory: Path) -> None:
    """Remove a staging directory unless something is left in it."""
    remaining = [path for path in directory.iterdir() if path.name != "source"]
    if remaining:
        if removals.NAME in {path.name for path in remaining}:
            logger.warning("%s has removals for a mount that may delete", directory)
        else:
            logger.warning("%s keeps files that were never closed; remove it at will", directory)
        return
    (directory / "source").unlink()
    directory.rmdir()


def adopt_file(writer: Writer, path: Path, *, may_be_open: bool = True) -> bool:
    """Stage a file of another node again, if it is to be uploaded; tell whether.

    What was not closed is kept, unless no program can have it open.
    """
    loaded = load(path)
    if loaded is None:
        path.with_suffix(".json").unlink(missing_ok=True)
        return False
    fd, record = loaded
    inode = None
    if record["is_closed"] and not record["is_unlinked"]:
        inode = _node(writer, record["key"], record["etag"], os.fstat(fd))
    if inode is not None:
        # Under both names at first: a second adoption does no harm, none would.
        os.link(path, writer.staging.directory / str(inode.nodeid))
        staged = writer.staging.take_up(inode, fd, record)
        staged.state = FileState.LEFTOVER
        writer.staging.record(staged)
        writer.flusher.list_staged(inode)
        writer.uploads.start(staged)
        logger.info("%s was left by an earlier mount, and is uploaded now", record["key"])
    else:
        os.close(fd)
        writer.uploads.abort_later(record["key"], record["upload"], record["begun_ns"])
        if (
            not record["is_unlinked"]
            and not record["uploaded"]
            and (record["is_closed"] or may_be_open)
        ):
            return False
    path.with_suffix(".json").unlink(missing_ok=True)
    path.unlink()
    return inode is not None


def _node(writer: Writer, key: str, etag: str | None, status: os.stat_result) -> Inode | None:
    """A new node for a file under its name; None if there is none, or a younger one."""
    inodes = writer.inodes
    if not key.startswith(inodes.prefix):
        return None
    *above, name = key[len(inodes.prefix) :].split("/")
    if not all(names.is_expressible(part) for part in (*above, name)):
        return None
    if names.is_private(inodes.prefix, (*above, name)[0]):
        return None
    parent = inodes.root
    for part in above:
        prefix = inodes.key(parent)
        parent = inodes.resolve(parent, part, None, prefix + part + "/")
        if parent.children is None:
            return None
        writer.directories.changed(prefix, part, None)
        inodes.count(parent, time.monotonic())
    assert parent.children is not None
    known = parent.children.get(name)
    if known is not None and known.staged is not None:
        return None
    info = ObjectInfo(key, status.st_size, etag or "", status.st_mtime_ns)
    inode = inodes.create(parent, name, info, key)
    inodes.count(inode, time.monotonic())
    return inode
