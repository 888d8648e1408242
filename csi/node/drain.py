"""Ends a mount after its uploads, so that no written file is lost.

close(2) returns when a file is in the bucket, so files wait for their upload only if an upload
failed, or if the volume has `durability=local`. Then the end of the mount waits for up to
`drainTimeout`, during any number of calls. Files that are not uploaded by then stay on the node's
disk, and the log says where.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from csi.errors import AbortedError
from csi.node.bind_mount import MountTable
from csi.node.mount_record import MountRecord
from csi.node.mounts import Mounts
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
        self._began: dict[str, float] = {}

    def check(self, record: MountRecord) -> None:
        """Refuse a mount's end during uploads; the first refusal starts the mount's `drainTimeout`.

        Raises:
            UploadingError: files wait for their upload and `drainTimeout` has not passed.
        """
        pending = self._pending(record)
        if pending and not self._is_given_up(record):
            raise UploadingError(pending)
        if pending:
            where = record.cache_directory
            log.error("given up: %s; the files are kept below %s", pending, where)

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
                self._began.pop(record.key, None)
                return True

    def reset(self, record: MountRecord) -> None:
        """Reset the `drainTimeout` of a mount that a pod uses again."""
        self._began.pop(record.key, None)

    def _is_given_up(self, record: MountRecord) -> bool:
        began = self._began.setdefault(record.key, time.monotonic())
        return time.monotonic() - began >= record.drain_timeout_s

    def _pending(self, record: MountRecord) -> str:
        """Return a sentence about the files that wait for their upload; "" if there are none."""
        table = MountTable()
        if table.top(Path(record.root)) is None:
            return ""
        is_alive = self._mounts.is_alive(record, table)
        if not is_alive and not self._mounts.supervisor.serves(Path(record.root), if_silent=True):
            return ""
        return self._reported(record)

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
