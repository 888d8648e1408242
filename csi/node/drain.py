"""Ends a mount after its uploads, so that no written file is lost.

`close` returns when a file is in the bucket, so files wait for their upload only if an upload
failed, or if a volume has chosen `durability=local`. Then the end of the mount waits for up to
`drainTimeout`, over as many calls as that takes. Files that cannot be uploaded by then stay on the
node's disk, and the log says where.
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
# Time for the daemon of a mount without targets to end.
LINGER_S = 6.0


class UploadingError(AbortedError):
    """A mount has files to upload before it may end."""


class Drains:
    """The mounts that are about to end, with the start time. One call at a time for each volume."""

    def __init__(self, mounts: Mounts) -> None:
        self._mounts = mounts
        self._began: dict[str, float] = {}

    def check(self, record: MountRecord) -> None:
        """Return if no file waits for its upload, or if `drainTimeout` is over.

        Raises:
            UploadingError: files wait for their upload; the message names them.
        """
        pending = self._pending(record)
        if pending and not self._is_given_up(record):
            raise UploadingError(pending)
        if pending:
            where = record.cache_directory
            log.error("given up: %s; the files are kept below %s", pending, where)

    def end(self, record: MountRecord, ends: float) -> bool:
        """End the mount; False if it stays without targets, and with nothing to upload.

        It stays if another mount namespace has a copy of a target, such as an agent's private copy
        of kubelet's directory. No pod waits for it, and it is forced to end after `drainTimeout`.

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
        """Forget that the mount was ending, as a pod uses it again: `drainTimeout` starts anew."""
        self._began.pop(record.key, None)

    def _is_given_up(self, record: MountRecord) -> bool:
        began = self._began.setdefault(record.key, time.monotonic())
        return time.monotonic() - began >= record.drain_timeout_s

    def _pending(self, record: MountRecord) -> str:
        """Describe the files that wait for their upload in a sentence; "" if there are none."""
        table = MountTable()
        if table.top(Path(record.root)) is None:
            return ""
        is_alive = self._mounts.is_alive(record, table)
        if not is_alive and not self._mounts.supervisor.serves(Path(record.root), if_silent=True):
            return ""
        return self._reported(record)

    def _reported(self, record: MountRecord) -> str:
        """Return what `_pending` does, asking the daemon without a check that there is one."""
        status = record.status()
        try:
            if status is not None:
                writing = status["writing"]
                return _describe(writing, record) if writing and writing["pending_files"] else ""
        except (KeyError, TypeError, ValueError, ArithmeticError):
            pass  # a hostile daemon's answer: its mount, too, ends when the time is over
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
