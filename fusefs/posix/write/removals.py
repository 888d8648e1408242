"""Deferred removals of objects: they are recorded, and many are sent to S3 in one request.

    STAGING/removals         a line for each removal: key, ETag, time (posix/journal/line_log.py)

A program that removes many files (rm -rf) waits for each call, and a DELETE for
each would take a round trip. So only the first files of a directory are deleted
while the program waits. The other removals are recorded, and a task sends them in batches, each
by one DeleteObjects request. If S3 refuses deletes in a directory, it refuses to delete the
first file, and the program's call fails.

An object is deleted only if it has the recorded ETag. A HEAD comes before each retry, and
before removals that an earlier process has left: an object that another client has put under the
key meanwhile stays. Changes of a key with a recorded removal wait until the object is deleted
(`StoreAfterRemovals`); listings do not show the object (`Directories.pending_changes`).
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import trio

from fusefs.posix.directory.listings import Directories
from fusefs.posix.journal.line_log import LineLog, line, load_lines
from fusefs.posix.nodes.names import is_at_or_below, split_key
from fusefs.posix.tasks import judged
from fusefs.store.contract import Store
from fusefs.store.errors import NotFoundError, StoreError, UnsupportedError
from fusefs.store.interface import (
    PLAIN,
    DeleteFailure,
    ListPage,
    ObjectInfo,
    ObjectVersion,
    UploadState,
    Write,
)
from fusefs.store.s3.multipart import Upload
from fusefs.telemetry.stalls import Work, waiting_for

logger = logging.getLogger("fusefs.removals")

NAME = "removals"

# Removals are deferred after MANY files in a row, with pauses of at most PAUSE_S between them.
MANY = 8
PAUSE_S = 1.0
# For this long after a delete, S3 counts as allowing deletes in the directory. MOST_ALLOWED is
# the largest number of directories that are remembered.
ALLOWED_S = 10.0
MOST_ALLOWED = 1000
# With more removals waiting, programs wait for each DELETE again.
MOST = 10_000
# DeleteObjects takes 1,000 keys, which a server removes one after the other: for 5,000 objects
# SeaweedFS takes 2.5 s by four requests of 250 at a time, and 4 s by one of 1,000 at a time.
AT_ONCE = 250
REQUESTS = 4
# Removals are gathered for this long if nothing waits for them. A request by itself costs as
# much processor time as the removal of some ten files.
GATHER_S = 0.05
RETRY_S = 5.0
RETRIES_AT_ONCE = 16
# The largest expected difference between the clocks of S3 and of this machine.
CLOCKS_NS = 60_000_000_000


@dataclass(slots=True, eq=False)
class Removal:
    """One object that is to be deleted.

    A program removed it at `removed_ns` (by this machine's clock); this process learnt of it at
    `since` (trio's seconds). Callers wait for `attempted`, set after the next request; the waits
    count for `work`. `error` is that of the last request; setting `hurry` starts a retry now.
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
        """The bytes of content to be sent: 0, as a removal has no content."""
        return 0

    def line(self) -> bytes:
        return line([self.key, self.etag, self.removed_ns])


class Removals:
    """The removals of one mount. Belongs to the event loop; its tasks live in `nursery`.

    A caller that waits for a removal gets its StoreError or OSError; a failed removal is retried.
    """

    def __init__(
        self, store: Store, directories: Directories, staging: Path, nursery: trio.Nursery
    ) -> None:
        self._store = store
        self._directories = directories
        self._log = LineLog(staging / NAME)
        self._nursery = nursery
        self._by_key: dict[str, Removal] = {}
        # The removals that no request has contained yet.
        self._new: dict[str, Removal] = {}
        self._is_running = False
        # The work of all DeleteObjects requests, for the statistics of waits.
        self._batches = Work()
        self._requests = trio.Semaphore(REQUESTS)
        self._is_sooner = trio.Event()
        # False once S3 has turned out not to support DeleteObjects.
        self._has_batches = True
        self._retrying = trio.CapacityLimiter(RETRIES_AT_ONCE)
        # By directory: the time until which S3 counts as allowing deletes, the oldest first.
        self._allowed: OrderedDict[str, float] = OrderedDict()
        # The length and the end of the latest row of removals.
        self._row = 0
        self._last = -math.inf

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def pending(self, key: str) -> list[Removal]:
        """The waiting removals at a key or below it ("": all)."""
        return [one for one in self._by_key.values() if is_at_or_below(one.key, key)]

    def keys(self, prefix: str) -> set[str]:
        """The keys that begin with `prefix` and whose objects wait to be deleted."""
        return {key for key in self._by_key if key.startswith(prefix)}

    # Removing

    def try_defer(self, key: str, etag: str | None) -> bool:
        """Record a removal, to be sent soon; False if the caller has to delete the object now.

        The result is False until a program removes many files, for the first file of each
        directory, for keys that a late request may change, if the ETag is unknown, if MOST
        removals wait, if the disk is full, and if S3 does not support DeleteObjects.
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
        """True if `try_defer` would record a removal of this key, given its ETag."""
        return (
            self.is_removing_from(split_key(key)[0])
            and self._has_batches
            and key not in self._by_key
            and len(self._by_key) < MOST
            and not self._store.unanswered.concerns(key)
        )

    def is_removing_from(self, prefix: str) -> bool:
        """True if a program is removing many files, and S3 has just deleted one in `prefix`."""
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
        """Delete an object now if its removal waits. Raises the error of the attempt."""
        while (removal := self._by_key.get(key)) is not None:
            attempted = removal.attempted
            removal.hurry.set()
            self._is_sooner.set()
            with waiting_for(removal.work):
                await attempted.wait()
            if removal.error is not None and self._by_key.get(key) is removal:
                raise removal.error

    async def flush_at(self, key: str) -> None:
        """Call `flush` for a, a/b and the key a/b/c; some servers allow no key below an object."""
        if not self._by_key:
            return
        at = key.find("/")
        while at >= 0:
            await self.flush(key[:at])
            at = key.find("/", at + 1)
        await self.flush(key)

    async def flush_below(self, prefix: str) -> None:
        """Call `flush` for the removals at or below a prefix until none waits."""
        while waiting := self.pending(prefix):
            self.hurry(prefix)
            for removal in waiting:
                await self.flush(removal.key)

    def hurry(self, key: str) -> None:
        """Start to delete all objects at or below a key whose removals wait."""
        for removal in self.pending(key):
            removal.error = None
            removal.hurry.set()
            self._is_sooner.set()

    async def drain(self) -> None:
        """Attempt each removal once. Failed removals stay recorded."""
        self.hurry("")
        for removal in self.pending(""):
            if self._by_key.get(removal.key) is removal and removal.error is None:
                await removal.attempted.wait()

    # Sending

    async def _run(self) -> None:
        """Send new removals in batches until none is left."""
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
        """Send one DeleteObjects request; free its slot in `_requests`; retry failures singly."""
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
        """Delete one object after `delay_s`, and try again until an attempt succeeds."""
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
        """Delete one object, unless a HEAD shows that it was replaced meanwhile."""
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
            removal.work = Work()  # from now on the object is deleted by a request of its own
        self._attempted(removal)

    def _attempted(self, removal: Removal) -> None:
        attempted, removal.attempted = removal.attempted, trio.Event()
        attempted.set()

    def _done(self, gone: list[Removal]) -> None:
        """Record that some objects are deleted, before other objects can be put under their keys.

        Otherwise the next process would delete a new object with the same ETag, such as that
        of all empty objects.
        """
        try:
            if len(gone) < len(self._by_key) or not self._log.write_anew([]):
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

    # Removals of an earlier process

    def adopt(self, key: str, etag: str, removed_ns: int, *, is_on_record: bool) -> None:
        """Record an earlier process's removal unless `is_on_record`; start to delete the object."""
        if key not in self._by_key:
            removal = Removal(key, etag, removed_ns, Work())
            if not is_on_record:
                self._log.append(removal.line())
            self._add(removal)
            self._nursery.start_soon(self._retry, removal, 0.0)

    def close(self) -> None:
        self._log.close(remove=not self._by_key)


class StoreAfterRemovals:
    """A `Store` that changes a key only after its removal, and hides removed objects in listings.

    Else a late removal could delete a newer object. A request that waits for a removal fails
    with the removal's error. Belongs to the event loop.
    """

    def __init__(self, store: Store, removals: Removals) -> None:
        self._store = store
        self._removals = removals
        self.tokens = store.tokens
        self.unanswered = store.unanswered
        # Requests about multipart uploads need not wait for removals.
        self.confirm = store.confirm
        self.complete = store.complete
        self.abort_upload = store.abort_upload
        self.list_uploads = store.list_uploads

    async def list_page(self, prefix: str, **options: Any) -> ListPage:
        """Call `Store.list_page`, and leave out objects to be deleted; a page may become empty."""
        leaving = self._removals.keys(prefix)
        page = await self._store.list_page(prefix, **options)
        leaving |= self._removals.keys(prefix)
        if not leaving:
            return page
        return replace(page, objects=[info for info in page.objects if info.key not in leaving])

    async def head(self, key: str) -> ObjectInfo:
        await self._removals.flush_at(key)
        return await self._store.head(key)

    async def put_file(self, key: str, fd: int, size: int, write: Write = PLAIN) -> ObjectInfo:
        await self._removals.flush_at(key)
        return await self._store.put_file(key, fd, size, write)

    async def begin_upload(self, key: str, write: Write = PLAIN) -> Upload:
        """Call `Store.begin_upload` once the removals of `key` are finished."""
        await self._removals.flush_at(key)
        return await self._store.begin_upload(key, write)

    async def resume_upload(self, state: UploadState) -> Upload:
        await self._removals.flush_at(state.key)
        return await self._store.resume_upload(state)

    async def copy(
        self, source: ObjectInfo | ObjectVersion, key: str, write: Write = PLAIN
    ) -> ObjectInfo:
        await self._removals.flush_at(key)
        return await self._store.copy(source, key, write)

    async def delete(self, key: str, etag: str | None = None, *, adopts: bool = False) -> None:
        await self._removals.flush_at(key)
        await self._store.delete(key, etag, adopts=adopts)

    async def delete_many(
        self, keys: Iterable[str], etags: Mapping[str, str] | None = None
    ) -> list[DeleteFailure]:
        wanted = list(keys)
        failures: list[DeleteFailure] = []
        for key in [key for key in wanted if key in self._removals]:
            try:
                await self._removals.flush_at(key)
            except (StoreError, OSError) as error:
                failures.append(DeleteFailure(key, error))
        failed = {failure.key for failure in failures}
        remaining = [key for key in wanted if key not in failed]
        return failures + await self._store.delete_many(remaining, etags)


def load(directory: Path) -> list[tuple[str, str, int]]:
    """Read the removals recorded in a staging directory: (key, ETag, time in ns). Blocks."""
    loaded: list[tuple[str, str, int]] = []
    for key, fields in load_lines(directory / NAME).items():
        try:
            etag, removed_ns = fields
            loaded.append((key, str(etag), int(removed_ns)))
        except (ValueError, TypeError):
            logger.warning("%s: what is on record of %s can't be read", directory / NAME, key)
    return loaded
