"""Removals that the bucket does not have yet: on record, and sent many in one request.

    STAGING/removals         one line for each of them: key, ETag, when (posix/journal/line_log.py)

A program that removes many files (rm -rf) waits for each call, and a DELETE for
each would take a round trip. So only the first files of a directory are deleted
while their program waits. Of those that follow the removal is put on record, and
a task sends what has come meanwhile as one DeleteObjects request. What S3 refuses
in one directory it refuses at its first file, which fails the call.

The object is deleted over its ETag. What could not be deleted, and what an earlier
process has left, is looked at first: another object that somebody has put there
meanwhile stays. Changes of such a key wait until it is gone (namespace/after_removals.py);
listings do not show it (`Directories.pending_changes`).
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import trio

from fusefs.posix.directory.listings import Directories
from fusefs.posix.journal.line_log import LineLog, line, load_lines
from fusefs.posix.nodes.names import is_at_or_below, split_key
from fusefs.posix.tasks import judged
from fusefs.store.contract import Store
from fusefs.store.errors import NotFoundError, UnsupportedError
from fusefs.telemetry.stalls import Work, waiting_for

logger = logging.getLogger("fusefs.removals")

NAME = "removals"

# A program that removes so many files one after the other, with no longer pauses, removes many.
MANY = 8
PAUSE_S = 1.0
# How long a directory counts as one in which S3 deletes, and how many of them are known.
ALLOWED_S = 10.0
MOST_ALLOWED = 1000
# Who removes more than S3 deletes waits for it.
MOST = 10_000
# DeleteObjects takes 1,000 keys, which a server removes one after the other: four requests at a
# time of a quarter each take SeaweedFS 2.5 s for 5,000 objects, where one of 1,000 takes 4.
AT_ONCE = 250
REQUESTS = 4
# For how long removals are gathered where nothing waits for them. A request costs as
# much processor time as the removal of some ten files, beside that of its keys.
GATHER_S = 0.05
RETRY_S = 5.0
RETRIES_AT_ONCE = 16
# By so much S3's clock may differ from this machine's.
CLOCKS_NS = 60_000_000_000


@dataclass(slots=True, eq=False)
class Removal:
    """One object that is to be deleted.

    `since` is in trio's seconds, `removed_ns` is when a program removed it by this
    machine's clock, and `error` what the last request failed with.
    `attempted` is set after the next request, which is a part of `work`, and `hurry`
    has that made now.
    """

    key: str
    etag: str
    removed_ns: int
    work: Work
    since: float = field(default_factory=trio.current_time)
    error: Exception | None = None
    attempted: trio.Event = field(default_factory=trio.Event)
    hurry: trio.Event = field(default_factory=trio.Event)

    def size(self) -> int:
        """The bytes that wait to be sent, which are none."""
        return 0

    def line(self) -> bytes:
        return line([self.key, self.etag, self.removed_ns])


class Removals:
    """The removals of one mount. Belongs to the event loop; its tasks live in `nursery`.

    Whoever waits for a removal that fails gets its StoreError or OSError; it stays on record.
    """

    def __init__(
        self, store: Store, directories: Directories, staging: Path, nursery: trio.Nursery
    ) -> None:
        self._store = store
        self._directories = directories
        self._log = LineLog(staging / NAME)
        self._nursery = nursery
        self._by_key: dict[str, Removal] = {}
        # Those of which no request was made yet.
        self._new: dict[str, Removal] = {}
        self._is_running = False
        # What the requests for many of them spend their time on.
        self._batches = Work()
        self._requests = trio.Semaphore(REQUESTS)
        self._is_sooner = trio.Event()
        # Whether S3 knows DeleteObjects, as far as is known.
        self._has_batches = True
        self._retrying = trio.CapacityLimiter(RETRIES_AT_ONCE)
        # Until when S3 counts as deleting in a directory, and what was removed of late.
        self._allowed: OrderedDict[str, float] = OrderedDict()
        self._row = 0
        self._last = -math.inf

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def pending(self, key: str) -> list[Removal]:
        """The waiting removals at a key or below it ("": all)."""
        return [one for one in self._by_key.values() if is_at_or_below(one.key, key)]

    def keys(self, prefix: str) -> set[str]:
        """The keys with a prefix whose objects wait to be deleted."""
        return {key for key in self._by_key if key.startswith(prefix)}

    # Removing

    def try_defer(self, key: str, etag: str | None) -> bool:
        """Put a removal on record that is to be sent soon; False if it is to be made now.

        That is so until a program removes many, in each directory for the first,
        for keys that a late request may change, where the disk is full, and where S3
        deletes no more than one with a request.
        """
        may_defer = self.may_defer(key)
        now = trio.current_time()
        self._row = self._row + 1 if now < self._last + PAUSE_S else 1
        self._last = now
        if not may_defer or not etag:
            return False
        removal = Removal(key, etag, time.time_ns(), self._batches)
        try:
            self._log.append(removal.line())
        except OSError as error:
            logger.info("%s is deleted at once: %s", key, error)
            return False
        self._new[key] = removal
        self._add(removal)
        if not self._is_running:
            self._is_running = True
            self._nursery.start_soon(self._run)
        return True

    def _add(self, removal: Removal) -> None:
        self._by_key[removal.key] = removal
        self._directories.pending_changes.leaving.add(removal.key)

    def may_defer(self, key: str) -> bool:
        """True if `try_defer` would put a removal on record, if the object's ETag is known."""
        return (
            self.is_removing_from(split_key(key)[0])
            and self._has_batches
            and key not in self._by_key
            and len(self._by_key) < MOST
            and not self._store.unanswered.concerns(key)
        )

    def is_removing_from(self, prefix: str) -> bool:
        """True if a program is removing many files, and has removed one in this directory."""
        now = trio.current_time()
        is_removing = self._row >= MANY and now < self._last + PAUSE_S
        return is_removing and self._allowed.get(prefix, -math.inf) > now

    def note_allowed(self, key: str) -> None:
        directory = split_key(key)[0]
        self._allowed[directory] = trio.current_time() + ALLOWED_S
        self._allowed.move_to_end(directory)
        if len(self._allowed) > MOST_ALLOWED:
            self._allowed.popitem(last=False)

    # Waiting

    async def flush(self, key: str) -> None:
        """Have an object deleted, if it is to be."""
        while (removal := self._by_key.get(key)) is not None:
            attempted = removal.attempted
            removal.hurry.set()
            self._is_sooner.set()
            with waiting_for(removal.work):
                await attempted.wait()
            if removal.error is not None and self._by_key.get(key) is removal:
                raise removal.error

    async def flush_at(self, key: str) -> None:
        """As `flush`, for a key to be changed: files above it have to be gone for some servers."""
        if not self._by_key:
            return
        at = key.find("/")
        while at >= 0:
            await self.flush(key[:at])
            at = key.find("/", at + 1)
        await self.flush(key)

    async def flush_below(self, prefix: str) -> None:
        """As `flush`, for everything at or below a prefix."""
        while waiting := self.pending(prefix):
            self.hurry(prefix)
            for removal in waiting:
                await self.flush(removal.key)

    def hurry(self, key: str) -> None:
        """Have everything at or below a key deleted now."""
        for removal in self.pending(key):
            removal.hurry.set()
            self._is_sooner.set()

    async def drain(self) -> None:
        """Send everything once. What fails stays on record."""
        self.hurry("")
        for removal in self.pending(""):
            if self._by_key.get(removal.key) is removal and removal.error is None:
                await removal.attempted.wait()

    # Sending

    async def _run(self) -> None:
        """Send what is new, until there is nothing more."""
        try:
            while self._new:
                if len(self._new) < AT_ONCE:
                    with trio.move_on_after(GATHER_S):
                        await self._is_sooner.wait()
                    self._is_sooner = trio.Event()
                await self._requests.acquire()
                batch = list(itertools.islice(self._new.values(), AT_ONCE))
                for removal in batch:
                    del self._new[removal.key]
                self._nursery.start_soon(self._delete_all, batch)
        finally:
            self._is_running = False

    async def _delete_all(self, batch: list[Removal]) -> None:
        """Make one request, in the place that was taken for it."""
        etags = {removal.key: removal.etag for removal in batch}
        failed: dict[str, Exception] = {}
        try:
            with self._batches.doing():
                failures = await self._store.delete_many(list(etags), etags)
            failed = {failure.key: failure.error for failure in failures}
        except Exception as error:
            failed = dict.fromkeys(etags, judged(error))
        finally:
            self._requests.release()
        self._done([removal for removal in batch if removal.key not in failed])
        for removal in batch:
            why = failed.get(removal.key)
            if isinstance(why, UnsupportedError):
                self._has_batches = False
                self._nursery.start_soon(self._retry, removal, 0.0)
            elif why is not None:
                self._note_failed(removal, why)
                self._nursery.start_soon(self._retry, removal, RETRY_S)

    async def _retry(self, removal: Removal, delay_s: float) -> None:
        """Delete an object by itself, as often as that takes."""
        while self._by_key.get(removal.key) is removal:
            with trio.move_on_after(delay_s):
                await removal.hurry.wait()
            removal.hurry = trio.Event()
            try:
                with removal.work.doing():
                    async with self._retrying:
                        await self._delete(removal)
            except Exception as error:
                self._note_failed(removal, judged(error))
                delay_s = RETRY_S
            else:
                self._done([removal])
                return

    async def _delete(self, removal: Removal) -> None:
        """Delete an object, unless it was replaced meanwhile."""
        try:
            found = await self._store.head(removal.key)
        except NotFoundError:
            return
        is_newer = found.mtime_ns > removal.removed_ns + CLOCKS_NS
        if found.etag == removal.etag and not is_newer:
            await self._store.delete(removal.key, removal.etag)
        else:
            logger.warning("%s was removed, and replaced by somebody else: it stays", removal.key)

    def _note_failed(self, removal: Removal, error: Exception) -> None:
        if removal.error is None:
            logger.warning("%s is not deleted in the bucket yet: %s", removal.key, error)
        removal.error = error
        if removal.work is self._batches:
            removal.work = Work()  # from now on it is deleted by itself
        self._attempted(removal)

    def _attempted(self, removal: Removal) -> None:
        attempted, removal.attempted = removal.attempted, trio.Event()
        attempted.set()

    def _done(self, gone: list[Removal]) -> None:
        """Some objects are gone.

        That is on record before anything else is put there: the next process would take
        an object with the same ETag, as all empty ones have, for what was removed.
        """
        try:
            is_more = len(gone) < len(self._by_key)
            if is_more or not self._log.write_anew([]):
                self._log.append(b"".join(line([removal.key]) for removal in gone))
        except OSError as error:
            for removal in gone:
                self._note_failed(removal, error)
                self._nursery.start_soon(self._retry, removal, RETRY_S)
            return
        for removal in gone:
            del self._by_key[removal.key]
            self.note_allowed(removal.key)
            self._directories.left(removal.key)
            self._attempted(removal)
        if self._log.is_large:
            self._log.write_anew(removal.line() for removal in self._by_key.values())

    # Another process's

    def adopt(self, key: str, etag: str, removed_ns: int, *, is_on_record: bool) -> None:
        """Take up what an earlier process was to delete."""
        if key not in self._by_key:
            removal = Removal(key, etag, removed_ns, Work())
            if not is_on_record:
                self._log.append(removal.line())
            self._add(removal)
            self._nursery.start_soon(self._retry, removal, 0.0)

    def close(self) -> None:
        self._log.close(remove=not self._by_key)


def load(directory: Path) -> list[tuple[str, str, int]]:
    """The removals in a staging directory's record: keys, ETags, times. Blocks."""
    loaded: list[tuple[str, str, int]] = []
    for key, fields in load_lines(directory / NAME).items():
        try:
            etag, removed_ns = fields
            loaded.append((key, str(etag), int(removed_ns)))
        except (ValueError, TypeError):
            logger.warning("%s: what is on record of %s can't be read", directory / NAME, key)
    return loaded
