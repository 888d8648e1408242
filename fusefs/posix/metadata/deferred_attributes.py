"""Changed attributes of closed files: programs see them at once, the bucket gets them later.

S3 has no request that changes only metadata: a new mode, owner or time takes a copy of the object
onto itself. Programs that unpack and copy (rsync, tar, cp -a) change all three after each close,
and rename the file. So a change is recorded, as a line of STAGING/attributes (journal/line_log.py),
and waits for DEFER_S (1 s); further changes in this time are sent with it. A rename adds the change
to its own copy, an open for writing adds it to the file's next upload, and a removal drops it.
`fsync`, `fusefs sync` and the end of the mount send it at once.

A change that S3 refuses stays recorded and is tried again. If another client has replaced or
removed the object, that client's change counts as the later one: the attributes are given up,
with a warning in the log.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import trio

from fusefs.posix.journal.line_log import LineLog, line, load_lines
from fusefs.posix.nodes.names import is_at_or_below
from fusefs.posix.nodes.object_metadata import Meta, read
from fusefs.posix.tasks import judged
from fusefs.store.contract import Store, find
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.fencing import ChangeToken
from fusefs.store.interface import ObjectInfo, Write
from fusefs.telemetry.stalls import Work, unattended, waiting_for

logger = logging.getLogger("fusefs.attributes")

NAME = "attributes"
DEFER_S = 1.0
# The pause between attempts to send a change.
RETRY_S = 5.0
AT_ONCE = 16
# The most waiting changes (5 MB, and 50 MB if all are sent at once). With more, programs wait.
MOST = 10_000
# An object put by this mount counts as unchanged by others for OWN_S; the most such objects.
OWN_S = 30.0
MOST_OWN = 4096
# The most tokens of unanswered requests that are recorded for one object.
MOST_TOKENS = 8


@dataclass(slots=True, eq=False)
class DeferredChange:
    """The new attributes (`meta`) that one object is to get; `info` is the object's version.

    The change was made at `since` and is to be sent at `due` (trio's seconds). `sending` is not
    None while a request is under way, which is a part of `work`; `error` is the last request's
    error. `changes` counts the changes of `meta`. `tokens` are the tokens of unanswered requests
    for `info`; `token` is the next request's token, None until it is recorded.
    """

    info: ObjectInfo
    meta: Meta
    tokens: tuple[str, ...] = ()
    token: ChangeToken | None = None
    changes: int = 0
    since: float = field(default_factory=trio.current_time)
    due: float = field(default_factory=lambda: trio.current_time() + DEFER_S)
    sending: trio.Event | None = None
    error: Exception | None = None
    work: Work = field(default_factory=Work)

    @property
    def key(self) -> str:
        return self.info.key

    def size(self) -> int:
        """The bytes of content that wait to be sent: 0, as attributes have no content."""
        return 0

    def line(self) -> bytes:
        info, metadata = self.info, self.meta.as_metadata()
        return line([info.key, info.etag, info.size, info.mtime_ns, metadata, *self.tokens])


def load(directory: Path, default: Meta) -> list[DeferredChange]:
    """Read the changes recorded in a staging directory; take missing attributes from `default`.

    Blocks.
    """
    changes: list[DeferredChange] = []
    for key, fields in load_lines(directory / NAME).items():
        try:
            etag, size, mtime_ns, metadata, *tokens = fields
            info = ObjectInfo(key, size, etag, mtime_ns)
            meta = read(dict(metadata), default)
            changes.append(DeferredChange(info, meta, tuple(map(str, tokens))))
        except (ValueError, TypeError):
            logger.warning("%s: what is on record of %s can't be read", directory / NAME, key)
    return changes


class OwnObjects:
    """The objects that this mount has put recently. Belongs to the event loop.

    Such an object has no tags, and no headers except its content type, so a copy with other
    metadata needs no HEAD before.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[str, tuple[float, ObjectInfo]] = OrderedDict()

    def note(self, info: ObjectInfo) -> None:
        """Remember an object that this mount has put; beyond MOST_OWN, forget the oldest one."""
        self._known[info.key] = time.monotonic(), info
        self._known.move_to_end(info.key)
        if len(self._known) > MOST_OWN:
            self._known.popitem(last=False)

    def get(self, info: ObjectInfo) -> ObjectInfo | None:
        """The object with its metadata if this mount has put this version recently, else None."""
        at, own = self._known.get(info.key, (0.0, info))
        is_young = time.monotonic() - at < OWN_S
        return own if is_young and at and own.version == info.version else None

    async def describe(self, source: ObjectInfo, key: str, write: Write) -> ObjectInfo:
        """Copy `source` to `key` with `write`'s metadata; StaleVersionError if `source` changed."""
        own = self.get(source)
        made = await self._store.copy(
            own or source.version, key, write._replace(is_own=own is not None)
        )
        if own is not None:
            self.note(made)
        return made


class DeferredAttributes:
    """The changed attributes of one mount that wait to be sent. Belongs to the event loop.

    The changes are recorded in the directory `staging`. After a change was sent, `landed` is called
    with the old and the new version of the object; if a change is given up, `lost` is called with
    the version. A change that can't be recorded raises OSError; a change that can't be sent yet
    raises StoreError.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        staging: Path,
        store: Store,
        own: OwnObjects,
        landed: Callable[[ObjectInfo, ObjectInfo], Awaitable[None]],
        lost: Callable[[ObjectInfo], None],
    ) -> None:
        self._nursery = nursery
        self._log = LineLog(staging / NAME)
        self._store = store
        self._own = own
        self._landed = landed
        self._lost = lost
        self._by_key: dict[str, DeferredChange] = {}
        # Changes that a rename or an upload under way has taken; they stay recorded until its end.
        self._taken: set[DeferredChange] = set()
        # Heap by due time; entries that were sent, taken or put off meanwhile are skipped.
        self._queue: list[tuple[float, int, DeferredChange]] = []
        self._numbers = itertools.count()
        self._is_running = False
        self._is_sooner = trio.Event()
        self._at_once = trio.CapacityLimiter(AT_ONCE)
        # Limits the tasks that send due changes: a task for each waiting change would be too many.
        self._due = trio.Semaphore(AT_ONCE)
        # Set when a change was sent or dropped, or failed.
        self._less = trio.Event()
        self._is_failing = False

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, info: ObjectInfo) -> Meta | None:
        """The attributes that wait to be sent for a version; None if there are none."""
        found = self._by_key.get(info.key) or next(
            (one for one in self._taken if one.key == info.key), None
        )
        return found.meta if found is not None and found.info.etag == info.etag else None

    def has(self, key: str) -> bool:
        return key in self._by_key

    def pending(self, key: str) -> list[DeferredChange]:
        """The changes of attributes that wait to be sent, at or below a key ("": all)."""
        return [one for one in self._by_key.values() if is_at_or_below(one.key, key)]

    # Changing

    @property
    def is_full(self) -> bool:
        """True if so many changes wait that programs have to wait before they make more."""
        return len(self._by_key) >= MOST

    async def wait_for_room(self) -> None:
        """Wait while too many changes wait (`is_full`), unless the bucket refuses them."""
        while self.is_full and not self._is_failing:
            await self._less.wait()

    def _note_less(self) -> None:
        self._less.set()
        self._less = trio.Event()

    def put(self, info: ObjectInfo, meta: Meta) -> None:
        """Record new attributes of a version, to be sent soon; OSError if the disk fails."""
        entry = self._by_key.get(info.key)
        if entry is not None and entry.info.etag == info.etag:
            self._log.append(replace(entry, meta=meta).line())
            entry.meta = meta
            entry.changes += 1
            entry.token = None
        else:
            entry = DeferredChange(info, meta)
            self._log.append(entry.line())
            self._add(entry)

    def _note(self, entry: DeferredChange) -> bool:
        """Record a change, to be sent in any case; if the disk fails, log that and return False."""
        try:
            self._log.append(entry.line())
            return True
        except OSError as error:
            logger.warning(
                "the attributes of %s are not on record, and lost if this process dies: %s",
                entry.key,
                error.strerror,
            )
            return False

    def _add(self, entry: DeferredChange) -> None:
        self._by_key[entry.key] = entry
        self._wait_for(entry)

    def _wait_for(self, entry: DeferredChange) -> None:
        if self._queue and entry.due < self._queue[0][0]:
            self._is_sooner.set()
        heapq.heappush(self._queue, (entry.due, next(self._numbers), entry))
        if not self._is_running:
            self._is_running = True
            self._nursery.start_soon(self._run)

    def renamed(self, key: str, info: ObjectInfo | None) -> None:
        """Move a change, made during the rename of `key`, to the new object `info` (None: drop)."""
        if (entry := self._by_key.pop(key, None)) is not None:
            if info is not None:
                new = DeferredChange(info, entry.meta)
                if not self._note(new):
                    new.due = new.since
                self._add(new)
            self._note_done(key)

    def drop(self, key: str) -> None:
        if self._by_key.pop(key, None) is not None:
            self._note_done(key)

    async def give_up(self, entry: DeferredChange) -> None:
        """Drop a change, once no request sends it, so that S3's attributes are shown."""
        await self.until_unsent(entry.key)
        self.drop(entry.key)
        self._lost(entry.info)

    def _note_done(self, key: str) -> None:
        self._note_less()
        self._log.done([key])
        remaining = [*self._taken, *self._by_key.values()]
        if not remaining or self._log.is_large:
            self._log.write_anew(entry.line() for entry in remaining)

    @asynccontextmanager
    async def taken(self, key: str) -> AsyncIterator[DeferredChange | None]:
        """Hand a key's change, or None, to the block to send or drop; an error puts it back."""
        await self.until_unsent(key)
        entry = self._by_key.pop(key, None)
        if entry is None:
            yield None
            return
        self._taken.add(entry)
        is_done = False
        try:
            yield entry
            is_done = True
        finally:
            self._taken.remove(entry)
            if key not in self._by_key:
                if is_done:
                    self._note_done(key)
                else:
                    self._add(entry)

    # Sending

    async def until_unsent(self, key: str) -> None:
        """Wait until no request that sends a key's change is under way."""
        while (entry := self._by_key.get(key)) is not None and entry.sending is not None:
            with waiting_for(entry.work):
                await entry.sending.wait()

    async def flush(self, key: str) -> None:
        """Send the changed attributes of a key, if any; raise the request's error."""
        while (entry := self._by_key.get(key)) is not None:
            entry.error = None
            await self._send(entry)
            if entry.error is not None:
                raise entry.error

    async def flush_below(self, prefix: str) -> None:
        """Send all changed attributes at or below a prefix; at the end, raise the first error."""
        waiting = self.pending(prefix)
        async with trio.open_nursery() as nursery:
            for entry in waiting:
                entry.error = None
                nursery.start_soon(self._send, entry)
        for entry in waiting:
            if entry.error is not None:
                raise entry.error
            await self.flush(entry.key)  # changes made while another task sent this one

    def hurry(self, key: str) -> None:
        """Start to send all changed attributes at or below a key; return at once."""
        for entry in self.pending(key):
            entry.error = None
            self._nursery.start_soon(self._send_unattended, entry)

    async def _run(self) -> None:
        """Send changed attributes when they are due, until none are left."""
        try:
            while self._queue:
                due = self._queue[0][0]
                if due > trio.current_time():
                    self._is_sooner = trio.Event()
                    with trio.move_on_at(due):
                        await self._is_sooner.wait()
                    continue
                await self._due.acquire()
                due, _, entry = heapq.heappop(self._queue)
                is_due = entry.due <= due and entry.sending is None
                if is_due and self._by_key.get(entry.key) is entry:
                    self._nursery.start_soon(partial(self._send_unattended, entry, is_due=True))
                else:
                    self._due.release()
        finally:
            self._is_running = False

    async def _send_unattended(self, entry: DeferredChange, *, is_due: bool = False) -> None:
        """Send a change for which no program waits; if `is_due`, then release `_due` (a limit)."""
        try:
            with unattended():
                await self._send(entry)
        finally:
            if is_due:
                self._due.release()

    async def _send(self, entry: DeferredChange) -> None:
        """Send a change, or wait for the request under way; a failure sets `entry.error`."""
        with waiting_for(entry.work):
            if entry.sending is not None:
                await entry.sending.wait()
                return
            entry.sending = trio.Event()
            try:
                with entry.work.doing():
                    async with self._at_once:
                        if self._by_key.get(entry.key) is entry:
                            await self._request(entry)
            except trio.Cancelled:
                # The waiting program was killed. `_run` may have skipped this change, because it
                # was being sent. Not due at once: at the mount's end it would be cancelled again.
                if self._by_key.get(entry.key) is entry:
                    entry.due = trio.current_time() + DEFER_S
                    self._wait_for(entry)
                raise
            finally:
                entry.sending.set()
                entry.sending = None

    async def _request(self, entry: DeferredChange) -> None:
        changes = entry.changes
        try:
            info = await self._copied(entry)
        except (NotFoundError, StaleVersionError) as error:
            if await self._may_come_back(entry, error):
                return
            self._lose(entry, "was replaced or removed")
        except (StoreError, OSError) as error:
            self._failed(entry, error)
        except Exception as error:  # the next process would meet the fault as well
            entry.error = judged(error)
            self._lose(entry, "cannot be changed")
        else:
            # Shielded: other changes of the key wait until the new version is shown.
            with trio.CancelScope(shield=True):
                await self._landed(entry.info, info)
            self._sent(entry, changes, info)

    def _lose(self, entry: DeferredChange, why: str) -> None:
        logger.warning("%s %s: its attributes are given up", entry.key, why)
        if self._by_key.get(entry.key) is entry:  # else the key has a newer change by now
            self.drop(entry.key)
        self._lost(entry.info)

    async def _may_come_back(self, entry: DeferredChange, error: StoreError) -> bool:
        """True if a change's version, missing by `error`, may come back by a repair.

        That is so if a late request may have undone the version, or if the HEAD that would tell
        fails. The change then counts as failed for now, and is tried again.
        """
        unanswered = self._store.unanswered
        if not unanswered.concerns(entry.key):
            return False
        try:
            found = await find(self._store, entry.key)
            is_there = found is not None and found.etag == entry.info.etag
            if not is_there and not unanswered.has_undone(entry.key, found):
                return False
            error = StoreError(f"a late request may have undone it: {error}")
        except StoreError as unknown:
            error = unknown
        self._failed(entry, error)
        return True

    async def _copied(self, entry: DeferredChange) -> ObjectInfo:
        """Send a change; retry if its earlier, unanswered request has made the object anew."""
        try:
            earlier = entry.tokens
            return await self._copy(entry)
        except StaleVersionError:
            made = await self._store.head(entry.key) if earlier else None
            if made is None or str(made.token) not in earlier:
                raise
        with trio.CancelScope(shield=True):
            await self._landed(entry.info, made)
        entry.info, entry.tokens, entry.token = made, (), None
        return await self._copy(entry) if self._by_key.get(entry.key) is entry else made

    async def _copy(self, entry: DeferredChange) -> ObjectInfo:
        """Copy the object onto itself with new attributes and a token that is on record."""
        if entry.token is None:
            entry.token = self._store.tokens.next()
            entry.tokens = (*entry.tokens, str(entry.token))[-MOST_TOKENS:]
            try:
                self._log.append(entry.line())
            except OSError as error:
                logger.info("the token of %s is not on record: %s", entry.key, error.strerror)
        write = Write(entry.meta.as_metadata(), token=entry.token)
        return await self._own.describe(entry.info, entry.key, write)

    async def is_about(self, entry: DeferredChange, info: ObjectInfo) -> bool:
        """True if `info` is the change's version, or the result of its earlier request."""
        if entry.info.etag == info.etag or not entry.tokens:
            return entry.info.etag == info.etag
        made = await find(self._store, entry.key)
        return made is not None and made.etag == info.etag and str(made.token) in entry.tokens

    def _failed(self, entry: DeferredChange, error: Exception) -> None:
        if entry.error is None:
            logger.warning("the attributes of %s are not in the bucket yet: %s", entry.key, error)
        entry.error = error
        entry.due = trio.current_time() + RETRY_S
        self._wait_for(entry)
        self._is_failing = True
        self._note_less()

    def _sent(self, entry: DeferredChange, changes: int, info: ObjectInfo) -> None:
        """Note that S3 has an entry's first `changes` changes; the object's version is `info`."""
        self._is_failing = False
        if self._by_key.get(entry.key) is not entry:
            return
        if entry.changes == changes:
            self.drop(entry.key)
        else:
            entry.info, entry.error = info, None
            entry.tokens, entry.token = (), None
            entry.due = trio.current_time() + DEFER_S
            self._note(entry)
            self._wait_for(entry)

    # Changes of an earlier process, and the mount's end

    def adopt(self, found: Iterable[DeferredChange], *, is_on_record: bool) -> None:
        """Take over the changes of an earlier process; record them unless `is_on_record`.

        A key with a newer change keeps that change.
        """
        new = [entry for entry in found if entry.key not in self._by_key]
        if new and not is_on_record:
            self._log.append(b"".join(entry.line() for entry in new))
        for entry in new:
            self._add(entry)

    async def drain(self) -> None:
        """Attempt to send each change of attributes once. Failed changes stay recorded."""
        for entry in self._by_key.values():
            entry.error = None
        while waiting := [entry for entry in self._by_key.values() if entry.error is None]:
            async with trio.open_nursery() as nursery:
                for entry in waiting:
                    nursery.start_soon(self._send, entry)

    def close(self) -> None:
        self._log.close(remove=not self._by_key and not self._taken)
