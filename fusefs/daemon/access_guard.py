"""The access guard: if S3 refuses the mount's identity, the cache is not served either.

Without the guard, an identity whose rights were revoked could continue to read from the cache. With
`--revoke-after TIME`, the mount checks its rights: whenever no request has succeeded for half of
TIME, it lists one key of its prefix. The cache is shut if S3 refuses all requests for TIME. Only
refusals count: a time-out, expired credentials or a failing server say nothing about rights.

While the cache is shut, lookups, opens and reads fail, and passthrough files that are not open are
unregistered. A check after a request that succeeded reopens the cache. The time of the refusals is
on record beside the mount's socket, so that the cache stays shut in the mount's next daemon.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import trio

from fusefs.store.s3.store import S3Store

logger = logging.getLogger("fusefs.daemon")

# Bounds of the pause between two checks of a server that refuses.
LONGEST_PAUSE_S = 10.0
SHORTEST_PAUSE_S = 0.5


class AccessGuard:
    """Guard of one mount's rights, off if `after_s` is inf; calls `shut(is_shut)` on a change."""

    def __init__(
        self,
        store: S3Store,
        prefix: str,
        after_s: float,
        record: Path,
        shut: Callable[[bool], None],
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._after_s = after_s
        self._record = record
        self._shut = shut
        self._since: float | None = None  # the time of the first refusal
        self.is_shut = False

    @property
    def refused_s(self) -> float | None:
        """The seconds for which S3 has refused the mount's requests; None if S3 accepts them."""
        return None if self._since is None else trio.current_time() - self._since

    def recall(self) -> None:
        try:
            age_s = time.monotonic() - float(self._record.read_text())
        except (OSError, ValueError):
            return
        self._since = trio.current_time() - max(0.0, age_s)
        self._judge()

    async def run(self) -> None:
        """Check the rights after half of `after_s` without a success, until cancelled."""
        if self._after_s == float("inf"):
            return
        quiet_s = self._after_s / 2
        while True:
            if self._since is None:
                await trio.sleep(max(SHORTEST_PAUSE_S, quiet_s))
            else:
                await trio.sleep(max(SHORTEST_PAUSE_S, min(LONGEST_PAUSE_S, quiet_s)))
            if self._store.answered < trio.current_time() - quiet_s or self._since is not None:
                await self._check()

    async def _check(self) -> None:
        began = trio.current_time()
        is_refused = await self._store.is_refused(self._prefix)
        if is_refused and self._since is None:
            self._since = began
            self._put_on_record()
        if self._since is not None and self._store.answered >= self._since:
            self._since = None
            self._put_on_record()
        if is_refused is not None:
            self._judge()

    def _put_on_record(self) -> None:
        """Record for the next daemon that S3 refuses, or remove the record.

        Errors are only logged, because that daemon checks the rights, too.
        """
        try:
            if self._since is None:
                self._record.unlink(missing_ok=True)
            else:
                self._record.write_text(str(time.monotonic() - trio.current_time() + self._since))
        except OSError as error:
            logger.warning("%s can't be changed: %s", self._record, error.strerror)

    def _judge(self) -> None:
        refused_s = self.refused_s
        is_shut = refused_s is not None and refused_s >= self._after_s
        if is_shut == self.is_shut:
            return
        self.is_shut = is_shut
        if is_shut:
            logger.warning(
                "S3 has refused every request for %.0f s: cached files are no longer served",
                refused_s,
            )
        else:
            logger.warning("S3 answers again: cached files are served")
        self._shut(is_shut)
