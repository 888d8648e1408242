"""One job of `fusefs warm` as it is counted and told of; who does it is in cache_warmer.py."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import trio

from fusefs.store.errors import StoreError
from fusefs.store.interface import ObjectInfo

# Files that could not be read and are named.
MOST_NAMED = 10
# The speed is that of the last so many seconds.
SPEED_OVER_S = 20


class Job:
    """Everything at or below `path` of the mount, "" being its root.

    `since` is when it was asked for, in seconds since the epoch. Sizes are in
    bytes; `files` and `size` are what the listing has told so far.
    """

    def __init__(self, path: str, since: float) -> None:
        self.path = path
        self.since = since
        self.scope = trio.CancelScope()
        self.is_listed = False
        self.has_ended = False
        self.is_full = False
        self.files = 0
        self.size = 0
        self.done_files = 0
        self.done = 0
        self.fetched = 0
        self.left_out_files = 0
        self.left_out = 0
        self.failed_files = 0
        self.failed: list[str] = []
        self.error: str | None = None
        # When how much had been fetched, by the monotonic clock.
        self._samples = deque([(time.monotonic(), 0)], maxlen=SPEED_OVER_S)

    @property
    def is_ending(self) -> bool:
        return self.has_ended or self.scope.cancel_called

    def is_within(self, path: str) -> bool:
        return not path or self.path == path or self.path.startswith(path + "/")

    def found(self, infos: Sequence[ObjectInfo], *, is_last: bool) -> None:
        """A page of the listing has told of these files."""
        self.files += len(infos)
        self.size += sum(info.size for info in infos)
        self.is_listed = is_last

    def has(self, size: int) -> None:
        """A file is there already."""
        self.done_files += 1
        self.done += size

    def arrived(self, size: int, fetched: int) -> None:
        """So many bytes are there, of which some had to be fetched."""
        self.done += size
        self.fetched += fetched
        now = time.monotonic()
        if now - self._samples[-1][0] >= 1:
            self._samples.append((now, self.fetched))

    def leave_out(self, size: int) -> None:
        """A file, or the rest of one, has no room."""
        self.left_out_files += 1
        self.left_out += size

    def lost(self, size: int, arrived: int) -> None:
        """A file, of which some had arrived, is no longer what was listed."""
        self.files -= 1
        self.size -= size
        self.done -= arrived

    def fail(self, path: str, error: StoreError) -> None:
        """A file can't be read."""
        self.failed_files += 1
        if len(self.failed) < MOST_NAMED:
            self.failed.append(f"{path} ({error})")

    def end(self) -> None:
        self.has_ended = True

    def describe(self, limit: int) -> dict[str, Any]:
        """The job as JSON can hold it; `limit` is what the cache may hold."""
        return {
            "path": self.path,
            "state": self._state(),
            "is_listed": self.is_listed,
            "files": self.files,
            "bytes": self.size,
            "done_files": self.done_files,
            "done_bytes": self.done,
            "fetched_bytes": self.fetched,
            "left_out_files": self.left_out_files,
            "left_out_bytes": self.left_out,
            "limit_bytes": limit,
            "failed_files": self.failed_files,
            "failed": self.failed,
            "why": self.error,
            "eta_s": self._eta_s(),
        }

    def _state(self) -> str:
        if not self.has_ended:
            return "under way" if self.files or self.is_listed else "listing"
        return "cancelled" if self.scope.cancelled_caught else "ended"

    def _eta_s(self) -> float | None:
        """Seconds until the end at the speed of late; None if there is no telling."""
        began, fetched = self._samples[0]
        passed_s = time.monotonic() - began
        if self.has_ended or not self.is_listed or self.fetched == fetched or passed_s <= 0:
            return None
        left = self.size - self.done - self.left_out
        return max(0, left) * passed_s / (self.fetched - fetched)
