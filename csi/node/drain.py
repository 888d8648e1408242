"""Ending a mount without losing what was written to it.

`close` returns when a file is in the bucket, so there is something left only
where that failed, or where a volume has chosen not to wait for it. Then the end
waits, for `drainTimeout` and over as many calls as that takes. What could not
be uploaded even so stays on the node's disk, and the log says where.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from csi.errors import AbortedError
from csi.node.bind_mount import Table
from csi.node.mount_record import MountRecord
from csi.node.mounts import Mounts
from fusefs.api import MIB, MountSettings

log = logging.getLogger(__name__)

MOST_NAMED = 3


class UploadingError(AbortedError):
    """A mount has something to upload before it may end."""


class Draining:
    """The mounts that are about to end. One call at a time for each volume."""

    def __init__(self, mounts: Mounts) -> None:
        self._mounts = mounts
        self._began: dict[str, float] = {}

    def check(self, record: MountRecord) -> None:
        """Return if nothing is left to upload, or it is given up.

        Raises:
            UploadingError: there still is something; it says what.
        """
        left = self._left(record)
        if left and not self._is_given_up(record):
            raise UploadingError(left)
        if left:
            cache = MountSettings.from_json(record.settings).cache_dir
            log.error("given up: %s; it is kept below %s", left, cache)

    def end(self, record: MountRecord, ends: float) -> None:
        """End the mount.

        Raises:
            AbortedError: it is still at work at `ends`.
            OSError: it cannot be unmounted.
        """
        self._began.setdefault(record.key, time.monotonic())
        is_forced = self._is_given_up(record)
        self._mounts.end(record, ends, is_forced=is_forced)
        self._began.pop(record.key, None)

    def is_used_again(self, record: MountRecord) -> None:
        """Somebody uses a mount whose end was waited for: later that has all its time again."""
        self._began.pop(record.key, None)

    def _is_given_up(self, record: MountRecord) -> bool:
        began = self._began.setdefault(record.key, time.monotonic())
        return time.monotonic() - began >= record.drain_timeout_s

    def _left(self, record: MountRecord) -> str:
        """What the mount has still to upload, as a sentence; empty if there is nothing."""
        table = Table()
        if table.top(Path(record.root)) is None or not self._mounts.is_alive(record, table):
            return ""
        status = self._mounts.ask(record)
        if status is None:
            return f"the mount of {record.source} does not tell what it has still to upload"
        writing = status["writing"]
        return _describe(writing, record) if writing and writing["pending_files"] else ""


def _describe(writing: dict[str, Any], record: MountRecord) -> str:
    pending = writing["pending"]
    size = sum(one["bytes"] for one in pending) / MIB
    names = ", ".join(one["key"] for one in pending[:MOST_NAMED])
    more = "" if len(pending) <= MOST_NAMED else " and others"
    since_s = max(one["since_s"] for one in pending)
    return (
        f"{writing['pending_files']} files ({size:.1f} MiB) are on their way to {record.source},"
        f" for {since_s:.0f} s: {names}{more}"
    )
