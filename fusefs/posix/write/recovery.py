"""What earlier mounts have left to be uploaded: found at the start, and brought to its end.

A mount that ended before the bucket had everything leaves its staging
directory behind (posix/write/staging.py). What a program had been told is kept, or
had waited to be told, is staged again under its name and uploaded; where
somebody else has replaced the object meanwhile, it is uploaded beside it. What
nobody had closed yet, a file that a power cut has torn, say, is left where it
is, and the log says where.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from fusefs.linux.files import try_lock
from fusefs.posix.metadata import attribute_log
from fusefs.posix.namespace import removals
from fusefs.posix.nodes import names
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.write.flush import Writeback
from fusefs.posix.write.staging_record import load, on_record
from fusefs.store.interface import ObjectInfo

logger = logging.getLogger("fusefs.leftovers")


def adopt(writer: Writeback) -> int:
    """Stage again what earlier mounts of the same bucket have left; return how many files."""
    own = writer.staging.directory
    count = 0
    # The youngest first: what it has of a name is the last that was written to it.
    for directory in sorted(own.parent.iterdir(), key=lambda path: path.name, reverse=True):
        if directory != own and directory.is_dir():
            count += _adopt_directory(writer, directory)
    return count


def _adopt_directory(writer: Writeback, directory: Path) -> int:
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


def adopt_attributes(writer: Writeback, directory: Path) -> None:
    """Have objects say what an earlier process was to have them say. Blocks."""
    for one in attribute_log.load(directory):
        if one.info.key.startswith(writer.inodes.prefix):
            writer.adopt_attributes(one)


def adopt_removals(writer: Writeback, directory: Path) -> bool:
    """Have objects deleted that an earlier process was to delete. Blocks.

    False if some of them are on record in `directory` alone.
    """
    is_on_record = directory == writer.staging.directory
    try:
        for key, etag, removed_ns in removals.load(directory):
            writer.adopt_removal(key, etag, removed_ns, is_on_record=is_on_record)
    except OSError as error:
        logger.warning("%s has removals for a later mount: %s", directory, error.strerror)
        return False
    return True


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
    left = [path for path in directory.iterdir() if path.name != "source"]
    if left:
        if removals.NAME in {path.name for path in left}:
            logger.warning("%s has removals for a mount that may delete", directory)
        else:
            logger.warning("%s keeps files that were never closed; remove it at will", directory)
        return
    (directory / "source").unlink()
    directory.rmdir()


def adopt_file(writer: Writeback, path: Path, *, may_be_open: bool = True) -> bool:
    """Stage a file of another node again, if it is to be uploaded; tell whether.

    What was not closed is kept, unless nobody can have been told that it is open.
    """
    found = load(path)
    if found is None:
        path.with_suffix(".json").unlink(missing_ok=True)
        return False
    fd, told = found
    inode = None
    if told["is_closed"] and not told["is_unlinked"]:
        inode = _node(writer, told["key"], told["etag"], os.fstat(fd))
    if inode is not None:
        # Under both names at first: a second adoption does no harm, none would.
        os.link(path, writer.staging.directory / str(inode.nodeid))
        staged = writer.staging.take_up(inode, fd, told)
        staged.is_leftover = True
        writer.staging.record(staged)
        writer.list_staged(inode)
        writer.uploads.start(staged)
        logger.info("%s was left by an earlier mount, and is uploaded now", told["key"])
    else:
        os.close(fd)
        writer.uploads.abort_later(told["key"], told["upload"], told["begun_ns"])
        if not told["is_unlinked"] and not told["uploaded"] and (told["is_closed"] or may_be_open):
            return False
    path.with_suffix(".json").unlink(missing_ok=True)
    path.unlink()
    return inode is not None


def _node(writer: Writeback, key: str, etag: str | None, found: os.stat_result) -> Inode | None:
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
    info = ObjectInfo(key, found.st_size, etag or "", found.st_mtime_ns)
    inode = inodes.create(parent, name, info, key)
    inodes.count(inode, time.monotonic())
    return inode
