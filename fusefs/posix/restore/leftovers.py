"""Find and complete, at a mount's start, the uploads that earlier mounts have left.

A mount that ended before the bucket had all changes leaves its staging directory behind
(posix/write/staging.py). A file that a program had closed is staged again under its name and
uploaded; if another client has replaced or removed the object meanwhile, the file is uploaded under
a name beside it. A file that no program had closed yet, or whose close still waited for the bucket
at a power cut, stays in that directory, and the log says where.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fusefs.linux import files
from fusefs.posix.directory.segment import ABSENT
from fusefs.posix.journal.line_log import LineLog
from fusefs.posix.metadata import deferred_attributes
from fusefs.posix.metadata.deferred_attributes import DeferredChange
from fusefs.posix.nodes import names, object_metadata
from fusefs.posix.nodes.inode import FileState, Inode, StagedFile
from fusefs.posix.nodes.names import split_key
from fusefs.posix.nodes.object_metadata import process_default
from fusefs.posix.write import aborts, removals
from fusefs.posix.write.staging import SOURCE
from fusefs.posix.write.staging_record import is_uploaded, load, on_record, remove_unrecorded, write
from fusefs.posix.write.writer import Writer
from fusefs.store.interface import ObjectInfo

logger = logging.getLogger("fusefs.leftovers")


def adopt(writer: Writer, alive: Callable[[], None] = lambda: None) -> int:
    """Stage the files that earlier mounts of the bucket have left; return their count.

    Blocks, and calls `alive` for each file: no upload may run before the younger files of its name,
    the removals and the unfinished renames are known.
    """
    own = writer.staging.directory
    count = 0
    # The youngest first: its files have the contents that were written last.
    for directory in sorted(own.parent.iterdir(), key=lambda path: path.name, reverse=True):
        if directory != own and directory.is_dir():
            count += _adopt_directory(writer, directory, alive)
    if count:
        logger.info("%d files were left by earlier mounts, and are uploaded now", count)
    return count


def _adopt_directory(writer: Writer, directory: Path, alive: Callable[[], None]) -> int:
    with files.closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        # A locked directory belongs to a mount that was detached and is still being ended.
        if not files.try_lock(fd) or not _is_ours(directory, writer.staging.source):
            return 0
        try:
            # This directory has to survive a power cut before files are moved into it.
            writer.staging.sync_names()
        except OSError as error:
            logger.error("%s is left to a later mount: %s", directory, error.strerror)
            return 0
        count = 0
        for path in on_record(directory):
            alive()
            count += adopt_file(writer, path)
        for name in adopt_logs(writer, directory):
            with contextlib.suppress(FileNotFoundError):
                files.sync(writer.staging.directory / name)
            (directory / name).unlink(missing_ok=True)
        _remove(directory)
        return count


def _adopt_attributes(writer: Writer, directory: Path, *, is_on_record: bool) -> bool:
    """Take over a log's attributes (`is_on_record`: our own); False if some have another prefix."""
    changes = deferred_attributes.load(directory, process_default())
    ours = [change for change in changes if change.key.startswith(writer.inodes.prefix)]
    writer.deferred.adopt(ours, is_on_record=is_on_record)
    if len(ours) == len(changes):
        return True
    if ours and not is_on_record:
        others = [change for change in changes if change not in ours]
        LineLog(directory / deferred_attributes.NAME).write_anew(change.line() for change in others)
    return False


def _adopt_removals(writer: Writer, directory: Path, *, is_on_record: bool) -> bool:
    """Take over all removals in a directory's log (`is_on_record`: our own); return True."""
    for key, etag, removed_ns in removals.load(directory):
        writer.removals.adopt(key, etag, removed_ns, is_on_record=is_on_record)
        writer.deferred.drop(key)
        prefix, name = split_key(key)
        # If the name has a change of its own, it was created again.
        if writer.directories.pending_changes.get(prefix, name) is None:
            writer.directories.changed(prefix, name, ABSENT)
    return True


def _adopt_aborts(writer: Writer, directory: Path, *, is_on_record: bool) -> bool:
    """Take over a log's multipart uploads (`is_on_record`: our own), to abort them; return True."""
    for key, upload_id in aborts.load(directory):
        writer.uploads.aborts.adopt(key, upload_id, is_on_record=is_on_record)
    return True


# By a log's name: the function that takes over its entries. With `is_on_record` the log is this
# mount's own. The result is False if the log is still needed.
_LOGS = {
    deferred_attributes.NAME: _adopt_attributes,
    aborts.NAME: _adopt_aborts,
    removals.NAME: _adopt_removals,
}


def adopt_logs(writer: Writer, directory: Path) -> list[str]:
    """Take over the entries of an earlier process's logs in a directory. Blocks.

    Returns the names of the logs that are not needed any more. A log stays needed if the disk
    is full, or if it has attributes of another prefix.
    """
    is_own = directory == writer.staging.directory
    done = []
    for name, adopt_all in _LOGS.items():
        if not is_own and name == removals.NAME and not writer.rules.may_delete:
            continue
        try:
            if adopt_all(writer, directory, is_on_record=is_own):
                done.append(name)
        except OSError as error:
            logger.warning("%s has %s for a later mount: %s", directory, name, error.strerror)
    return done


def restore(writer: Writer, inode: Inode) -> None:
    """Restore the file that an earlier process staged for a node, if there is one."""
    staged = writer.staging.restore(inode)
    if staged is None:
        return
    if not staged.is_unlinked and _was_replaced(writer, inode):
        writer.staging.unlink(staged)
    if staged.is_unlinked:
        if inode.is_current:
            writer.inodes.detach([inode])
        state = staged.upload_state.plain() if staged.upload_state is not None else None
        writer.uploads.aborts.adopt_of_file(staged.key, state, staged.begun_ns)
        staged.upload_state = staged.begun_ns = None
    else:
        writer.flusher.list_staged(inode)
        if staged.exclusive is not None:
            writer.exclusive.watch(staged)


def _was_replaced(writer: Writer, inode: Inode) -> bool:
    """True if an unfinished rename has given the node's name to another staged file."""
    now = inode.parent.child(inode.name) if inode.parent is not None else None
    if now is None or now is inode:
        return False
    return (writer.staging.directory / str(now.nodeid)).exists()


def drop_unneeded(writer: Writer) -> None:
    """Release unlinked files without handles; redo RELEASE for ABANDONED and taken out files."""
    for staged in writer.staging:
        if staged.is_unlinked and not staged.inode.is_open:
            staged.inode.meta = staged.described()
            writer.staging.release(staged)
        elif staged.state is FileState.ABANDONED or staged.backing is not None:
            writer.flusher.released(staged.inode)


def _is_ours(directory: Path, source: str) -> bool:
    """True if a staging directory is of the bucket `source`; else log the files that stay in it."""
    named = directory / SOURCE
    found = named.read_text(errors="replace") if named.exists() else ""
    if found == source:
        return True
    remaining = sorted(set(os.listdir(directory)) - {SOURCE})
    if found.strip("\0"):
        logger.warning("%s has files that wait to be uploaded to %s", directory, found)
    elif remaining:
        # A power cut took SOURCE, which is synced before any program relies on other files here.
        logger.error(
            "%s has %s, which no mount sends: its file %s, which named the bucket, is gone or "
            "empty. If that was this one, write it anew with the text %r, and mount again",
            directory,
            remaining,
            SOURCE,
            source,
        )
    return False


def _remove(directory: Path) -> None:
    """Remove a staging directory, unless files are left in it, which are logged."""
    remaining = {path.name for path in directory.iterdir()} - {SOURCE}
    if remaining:
        logger.warning("%s keeps what this mount does not send: %s", directory, sorted(remaining))
        return
    (directory / SOURCE).unlink()
    directory.rmdir()


def adopt_file(writer: Writer, path: Path, *, may_be_open: bool = True) -> bool:
    """Stage a file that another process left, if it has to be uploaded; True if it is staged.

    A file that was not closed stays where it is if a program may have it open (`may_be_open`); so
    does a closed file whose key is outside this mount.
    """
    loaded = load(path)
    if loaded is None:
        remove_unrecorded(path)
        return False
    fd, record = loaded
    inode = None
    if record["is_closed"] and not record["is_unlinked"]:
        if (younger := _younger(writer, record["key"])) is not None:
            _give_way(writer, path, fd, record, younger)
            return False
        inode = _node(writer, record["key"], record["etag"], os.fstat(fd))
    if inode is not None:
        _link(path, writer.staging.directory / str(inode.nodeid))
        staged = writer.staging.take_up(inode, fd, record)
        staged.state = FileState.LEFTOVER
        writer.staging.record(staged)
        writer.flusher.list_staged(inode)
        writer.uploads.start(staged)
    else:
        status = os.fstat(fd)
        os.close(fd)
        has_all = is_uploaded(record, status)
        if not has_all and record["is_closed"] and not record["is_unlinked"]:
            logger.warning("%s waits in %s for a mount that has the name", record["key"], path)
            return False
        writer.uploads.aborts.adopt_of_file(record["key"], record["upload"], record["begun_ns"])
        if not has_all and not record["is_unlinked"] and may_be_open:
            _adopt_attributes_of(writer, path, record, is_kept=True)
            return False
        if not _adopt_attributes_of(writer, path, record, is_kept=False):
            return False
    _unlink(path)
    return inode is not None


def _adopt_attributes_of(
    writer: Writer, path: Path, record: dict[str, Any], *, is_kept: bool
) -> bool:
    """Take over the attributes in an open file's record; False if the record is still needed.

    With `is_kept`, the record stays, without the attributes.
    """
    if not record.get("attributes") or record["is_unlinked"] or record["is_closed"]:
        return True
    key = record["key"]
    if not key.startswith(writer.inodes.prefix):
        return False
    size, mtime_ns = record["attributes"]
    meta = object_metadata.read(record["metadata"], process_default()).changed(mtime_ns=mtime_ns)
    info = ObjectInfo(key, size, record["etag"], mtime_ns)
    try:
        if _younger(writer, key) is None:
            writer.deferred.adopt([DeferredChange(info, meta)], is_on_record=False)
        if is_kept:
            write(str(path), json.dumps(record | {"attributes": None}).encode())
    except OSError as error:
        logger.warning("%s has attributes for a later mount: %s", path, error.strerror)
        return False
    return True


def _link(path: Path, new: Path) -> None:
    """Link a file into this mount's directory, the record first, so that a kill loses neither."""
    with contextlib.suppress(FileNotFoundError):
        os.link(path.with_suffix(".json"), new.with_suffix(".json"))
    os.link(path, new)


def _unlink(path: Path) -> None:
    path.with_suffix(".json").unlink(missing_ok=True)
    path.unlink()


def _younger(writer: Writer, key: str) -> StagedFile | None:
    """The newer file that is staged under a key (the newest are staged first), or None."""
    inode = writer.inodes.at(key)
    return inode.staged if inode is not None and writer.inodes.key(inode) == key else None


def _give_way(
    writer: Writer, path: Path, fd: int, record: Mapping[str, Any], younger: StagedFile
) -> None:
    """Remove a file whose key has the newer file `younger`.

    A content that neither `younger` nor the bucket has is kept under another name and logged.
    """
    status = os.fstat(fd)
    # A killed process may have staged this very file, or the bucket has the content already.
    is_there = os.path.samestat(status, os.fstat(younger.fd)) or is_uploaded(record, status)
    os.close(fd)
    if is_there:
        _unlink(path)
        return
    writer.uploads.aborts.adopt_of_file(record["key"], record["upload"], record["begun_ns"])
    kept = path.with_name(f"replaced-{path.name}")
    path.rename(kept)
    path.with_suffix(".json").unlink(missing_ok=True)
    logger.warning("%s was written anew: what it was before is in %s", record["key"], kept)


def _node(writer: Writer, key: str, etag: str | None, status: os.stat_result) -> Inode | None:
    """Create a node for a file's key; None if the key has no name on this mount."""
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
        parent = inodes.resolve(parent, part, None)
        if parent.children is None:
            return None
        writer.directories.changed(prefix, part, None)
        inodes.count(parent, time.monotonic())
    info = ObjectInfo(key, status.st_size, etag or "", status.st_mtime_ns)
    inode = inodes.create(parent, name, info)
    inodes.count(inode, time.monotonic())
    return inode
