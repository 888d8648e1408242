"""Ends a mount after its uploads, so that no written file is lost.

close(2) returns when a file is in the bucket, so files wait for their upload only if an upload
failed, or if the volume has `durability=local`. Then the end of the mount waits for up to
`drainTimeout`, during any number of calls. Files that are not uploaded by then stay on the node's
disk, and the log says where.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from csi.errors import AbortedError
from csi.node.bind_mount import MountTable
from csi.node.mount_record import MountRecord
from csi.node.mounts import Mounts
from fusefs.cli import left_behind, sync
from fusefs.launch import registry
from fusefs.settings.types import MIB

log = logging.getLogger(__name__)

MOST_NAMED = 3
# Time that the processes of an unused mount have to end before its uploads are looked at again.
LINGER_S = 6.0


class UploadingError(AbortedError):
    """The mount must not end yet, because files wait for their upload."""


class Drains:
    """Ends mounts after their uploads or `drainTimeout`. Callers serialise calls for a volume."""

    def __init__(self, mounts: Mounts) -> None:
        self._mounts = mounts

    def check(self, record: MountRecord) -> None:
        """Refuse a mount's end during uploads; the first refusal starts the mount's `drainTimeout`.

        Raises:
            UploadingError: files wait for their upload and `drainTimeout` has not passed.
        """
        pending, may_come = self.pending(record)
        if pending and may_come and not self._is_given_up(record):
            raise UploadingError(pending)
        if pending:
            log.error("given up: %s; the files are kept below %s", pending, record.cache_directory)

    def end(self, record: MountRecord, ends: float) -> bool:
        """End a mount without targets; return False if it continues, although no upload is left.

        The mount continues if another mount namespace has a copy of a target, such as an agent's
        private copy of kubelet's directory. After `drainTimeout` a call ends it by force.

        Raises:
            AbortedError: the daemon still has files to upload at `ends` (monotonic clock).
            OSError: the mount cannot be unmounted.
        """
        while True:
            is_forced = self._is_given_up(record)
            until = min(ends, time.monotonic() + LINGER_S)
            try:
                self._mounts.end(record, until, is_forced=is_forced)
            except AbortedError:
                if not self._reported(record):
                    return False
                if time.monotonic() >= ends:
                    raise
            else:
                return True

    def _is_given_up(self, record: MountRecord) -> bool:
        known = self._mounts.records.read(record.key) or record
        began = known.drain_began or time.monotonic()
        if not known.drain_began:
            with contextlib.suppress(OSError):  # a full disk prolongs the drain
                self._mounts.records.write(known.key, replace(known, drain_began=began))
        return time.monotonic() - began >= record.drain_timeout_s

    def pending(self, record: MountRecord) -> tuple[str, bool]:
        """Describe the files waiting for upload, or ""; with True if they may still be uploaded."""
        path, table = Path(record.root), MountTable()
        root, supervisor = table.top(path), self._mounts.supervisor
        if root is None:
            return "", False
        if self._mounts.is_alive(record, table) or supervisor.serves(path, if_silent=True):
            return self._reported(record), True
        link, cache, left = registry.staging_of(path), record.cache_directory, []
        if link is not None and cache is not None:
            # A hostile daemon may have made the link: only its name counts, not its directory.
            state = cache / "mounts" / registry.directory_of(path).name
            with contextlib.suppress(OSError):
                left = left_behind.find(state / "staging" / link.name, ())
        if not left:
            return "", False
        # The reconciler resumes a mount that is held.
        return f"{record.source} has no daemon; {sync.describe(left)}", supervisor.has(root)

    def _reported(self, record: MountRecord) -> str:
        """Describe the waiting files ("" for none), or say that the daemon does not report them."""
        status = record.status()
        try:
            if status is not None:
                writing = status["writing"]
                return _describe(writing, record) if writing and writing["pending_files"] else ""
        except (KeyError, TypeError, ValueError, ArithmeticError):
            pass  # from a hostile daemon: `drainTimeout` holds for its mount, too
        return f"the mount of {record.source} does not report its uploads"


def _describe(writing: dict[str, Any], record: MountRecord) -> str:
    pending = writing["pending"]
    size = sum(file["bytes"] for file in pending) / MIB
    names = ", ".join(file["key"] for file in pending[:MOST_NAMED])
    more = "" if len(pending) <= MOST_NAMED else " and others"
    since_s = max(file["since_s"] for file in pending)
    return (
        f"{writing['pending_files']} files ({size:.1f} MiB) are on their way to {record.source},"
        f" for {since_s:.0f} s: {names}{more}"
    )
