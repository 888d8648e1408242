"""Attributes of closed files: shown here at once, in the bucket within about a second.

S3 has no request for metadata alone: a mode, an owner or a time that changes
is a copy of the object onto itself. Programs that unpack and copy (rsync, tar,
cp -a) change three of them after each close, and rename the file. So a change
is put on record (attribute_log.py) and waits for DEFER_S, and what changes
meanwhile goes along: a rename takes it into its own copy, an open for writing
into the file's next content, and removing the file drops it. `fsync`, `fusefs
sync` and the end of the mount do not wait that long.

What S3 refuses stays on record and is tried again. If another client has
replaced or removed the object, its change was the later one: then the
attributes are given up, and the log says so.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import trio

from fusefs.posix.metadata.attribute_log import AttributeLog, RecordedAttributes
from fusefs.posix.nodes.names import is_at_or_below
from fusefs.posix.nodes.object_metadata import Meta
from fusefs.posix.types import find
from fusefs.store.contract import Store
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.fencing import ChangeToken
from fusefs.store.interface import ObjectInfo, Write
from fusefs.telemetry.stalls import Work, unattended, waiting_for

logger = logging.getLogger("fusefs.attributes")

DEFER_S = 1.0
# How often what failed is tried again.
RETRY_S = 5.0
AT_ONCE = 16
# Who changes the attributes of more files than S3 takes waits for it: 5 MB, and ten times that
# where all are to be sent at once.
MOST = 10_000
# How long what was put here counts as not having been described by others, and how many do.
OWN_S = 30.0
MOST_OWN = 4096
# Of how many requests for one object it is known that they may have been executed.
MOST_TOKENS = 8


@dataclass(slots=True, eq=False)
class DeferredChange:
    """The attributes that one object is to have; `info` is the version that it is about.

    `since` and `due` are in trio's seconds. `sending` is set while a request is
    under way, which is a part of `work`, and `error` is what the last one failed
    with. `changes` counts how often it was changed. `tokens` are those of the
    requests over `info` that were not answered, as far as is known, and `token` is that
    of the next one, None until it is on record.
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
        """The bytes that wait to be sent, which are none."""
        return 0

    def recorded(self) -> RecordedAttributes:
        return RecordedAttributes(self.info, self.meta.as_metadata(), self.tokens)


class OwnObjects:
    """The objects that this mount has just put into the bucket. Belongs to the event loop.

    Such an object has no tags and headers beside its content type, so that a
    copy of it with other metadata needs no HEAD before.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[str, tuple[float, ObjectInfo]] = OrderedDict()

    def note(self, info: ObjectInfo) -> None:
        """Remember an object as this mount has put it; the oldest of many are forgotten."""
        self._known[info.key] = time.monotonic(), info
        self._known.move_to_end(info.key)
        if len(self._known) > MOST_OWN:
            self._known.popitem(last=False)

    def get(self, info: ObjectInfo) -> ObjectInfo | None:
        """The object of a version as it was put, if that is not long ago."""
        at, own = self._known.get(info.key, (0.0, info))
        is_young = time.monotonic() - at < OWN_S
        return own if is_young and at and own.version == info.version else None

    async def describe(self, source: ObjectInfo, key: str, write: Write) -> ObjectInfo:
        """Copy a version, if it is there still, with the metadata of `write`."""
        own = self.get(source)
        made = await self._store.copy(
            own or source.version, key, write._replace(is_own=own is not None)
        )
        if own is not None:
            self.note(made)
        return made


class DeferredAttributes:
    """The attributes of one mount's files that are to be sent. Belongs to the event loop.

    `landed` is called with the old version and the new one, and `lost` if there is no such
    version any more.
    What can't be put on record raises OSError, what could not be sent StoreError; it is kept.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        log: AttributeLog,
        store: Store,
        own: OwnObjects,
        landed: Callable[[ObjectInfo, ObjectInfo], Awaitable[None]],
        lost: Callable[[ObjectInfo], None],
    ) -> None:
        self._nursery = nursery
        self._log = log
        self._store = store
        self._own = own
        self._landed = landed
        self._lost = lost
        self._by_key: dict[str, DeferredChange] = {}
        # What goes along with a change that is under way: on record until that is done.
        self._taken: set[DeferredChange] = set()
        # By when each is due; what was sent or taken meanwhile is passed over.
        self._queue: list[tuple[float, int, DeferredChange]] = []
        self._numbers = itertools.count()
        self._is_running = False
        self._is_sooner = trio.Event()
        self._at_once = trio.CapacityLimiter(AT_ONCE)
        # Those that are sent when they are due: a task for each that waits would be too many.
        self._due = trio.Semaphore(AT_ONCE)
        # Set when something was sent or dropped, or could not be sent.
        self._less = trio.Event()
        self._is_failing = False

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, info: ObjectInfo) -> Meta | None:
        """The attributes that a version is to have; None if its object has them."""
        found = self._by_key.get(info.key)
        return found.meta if found is not None and found.info.etag == info.etag else None

    def has(self, key: str) -> bool:
        return key in self._by_key

    def pending(self, key: str) -> list[DeferredChange]:
        """The waiting changes of a file, or of all below a prefix ("": of everything)."""
        return [one for one in self._by_key.values() if is_at_or_below(one.key, key)]

    # Changing

    @property
    def is_full(self) -> bool:
        """True if so many changes wait that others have to wait for them."""
        return len(self._by_key) >= MOST

    async def wait_for_room(self) -> None:
        """Wait while there are very many changes, and the bucket takes them."""
        while self.is_full and not self._is_failing:
            await self._less.wait()

    def _note_less(self) -> None:
        self._less.set()
        self._less = trio.Event()

    def put(self, info: ObjectInfo, meta: Meta) -> None:
        """Have a version's object say something, soon; on record when this returns."""
        entry = self._by_key.get(info.key)
        if entry is not None and entry.info.etag == info.etag:
            self._log.append(
                RecordedAttributes(entry.info, meta.as_metadata(), entry.tokens).line()
            )
            entry.meta = meta
            entry.changes += 1
            entry.token = None
        else:
            self._log.append(RecordedAttributes(info, meta.as_metadata()).line())
            self._add(DeferredChange(info, meta))

    def _note(self, record: RecordedAttributes) -> bool:
        """Put a change on record if the disk takes it; it is sent in any case."""
        try:
            self._log.append(record.line())
            return True
        except OSError as error:
            logger.warning(
                "the attributes of %s are not on record, and lost if this process dies: %s",
                record.info.key,
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
        """Hand over to the new object what was changed while the object got another key."""
        entry = self._by_key.pop(key, None)
        if entry is not None:
            if info is not None:
                new = DeferredChange(info, entry.meta)
                if not self._note(new.recorded()):
                    new.due = new.since
                self._add(new)
            self._note_done(key)

    def drop(self, key: str) -> None:
        if self._by_key.pop(key, None) is not None:
            self._note_done(key)

    async def give_up(self, key: str) -> int:
        """Give up what waits, as `pending`; return how many files have the bucket's attributes."""
        given_up = self.pending(key)
        for entry in given_up:
            await self.until_unsent(entry.key)
            self.drop(entry.key)
            self._lost(entry.info)
        return len(given_up)

    def _note_done(self, key: str) -> None:
        self._note_less()
        self._log.done([key])
        remaining = [*self._taken, *self._by_key.values()]
        if not remaining or self._log.is_large:
            self._log.write_anew(entry.recorded().line() for entry in remaining)

    @asynccontextmanager
    async def taken(self, key: str) -> AsyncIterator[DeferredChange | None]:
        """Make a change needless, or take it along; it is sent after all if that fails."""
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
        """Wait until no request for a key is under way."""
        while (entry := self._by_key.get(key)) is not None and entry.sending is not None:
            with waiting_for(entry.work):
                await entry.sending.wait()

    async def flush(self, key: str) -> None:
        """Have the bucket say what an object is to say."""
        while (entry := self._by_key.get(key)) is not None:
            entry.error = None
            await self._send(entry)
            if entry.error is not None:
                raise entry.error

    async def flush_below(self, prefix: str) -> None:
        """As `flush`, for everything at or below a prefix; the first error after all are sent."""
        waiting = self.pending(prefix)
        async with trio.open_nursery() as nursery:
            for entry in waiting:
                entry.error = None
                nursery.start_soon(self._send, entry)
        for entry in waiting:
            if entry.error is not None:
                raise entry.error
            await self.flush(entry.key)  # what was changed while another task sent it

    def hurry(self, key: str) -> None:
        """Have everything at or below a key sent now."""
        for entry in self.pending(key):
            entry.error = None
            self._nursery.start_soon(self._send_unattended, entry)

    async def _run(self) -> None:
        """Send what is due, until there is nothing left."""
        try:
            while self._queue:
                due = self._queue[0][0]
                if due > trio.current_time():
                    self._is_sooner = trio.Event()
                    with trio.move_on_at(due):
                        await self._is_sooner.wait()
                    continue
                await self._due.acquire()
                _, _, entry = heapq.heappop(self._queue)
                if self._by_key.get(entry.key) is entry and entry.sending is None:
                    self._nursery.start_soon(partial(self._send_unattended, entry, is_due=True))
                else:
                    self._due.release()
        finally:
            self._is_running = False

    async def _send_unattended(self, entry: DeferredChange, *, is_due: bool = False) -> None:
        """As `_send`, where the request that has begun this task does not wait for it."""
        try:
            with unattended():
                await self._send(entry)
        finally:
            if is_due:
                self._due.release()

    async def _send(self, entry: DeferredChange) -> None:
        """Send a change; one that is under way is waited for."""
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
                # The program that waited was killed. `_run` may have passed this change over, as
                # it was being sent. Not due at once: while the mount ends this is cancelled again.
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
            logger.warning("%s was replaced or removed: its attributes are given up", entry.key)
            if self._by_key.get(entry.key) is entry:  # else they are another version's by now
                self.drop(entry.key)
            self._lost(entry.info)
        except (StoreError, OSError) as error:
            self._failed(entry, error)
        else:
            # A change or a removal that comes before this is shown waits for it.
            with trio.CancelScope(shield=True):
                await self._landed(entry.info, info)
            self._sent(entry, changes, info)

    async def _may_come_back(self, entry: DeferredChange, error: StoreError) -> bool:
        """True if a version that is gone may be put back, as a late request has undone it.

        Its change has failed for now then, and so it has where the bucket could not tell.
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
        """Send a change, also over what an earlier request of it has made without an answer."""
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
        if self._by_key.get(entry.key) is not entry:
            return made
        return await self._copy(entry)

    async def _copy(self, entry: DeferredChange) -> ObjectInfo:
        """Send the request, with a token on record by which the next process knows its work."""
        if entry.token is None:
            entry.token = self._store.tokens.next()
            entry.tokens = (*entry.tokens, str(entry.token))[-MOST_TOKENS:]
            try:
                self._log.append(entry.recorded().line())
            except OSError as error:
                logger.info("the token of %s is not on record: %s", entry.key, error.strerror)
        write = Write(entry.meta.as_metadata(), token=entry.token)
        return await self._own.describe(entry.info, entry.key, write)

    async def is_about(self, entry: DeferredChange, info: ObjectInfo) -> bool:
        """True if a change is about a version, or an earlier request has made that one of it."""
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
        """The bucket has the first so many changes of an object, which is another one for that."""
        self._is_failing = False
        if self._by_key.get(entry.key) is not entry:
            return
        if entry.changes == changes:
            self.drop(entry.key)
        else:
            entry.info, entry.error = info, None
            entry.tokens, entry.token = (), None
            entry.due = trio.current_time() + DEFER_S
            self._note(entry.recorded())
            self._wait_for(entry)

    # Another process's

    def adopt(
        self, found: Iterable[tuple[RecordedAttributes, Meta]], *, is_on_record: bool
    ) -> None:
        """Take up what an earlier process was to send."""
        new = [(record, meta) for record, meta in found if record.info.key not in self._by_key]
        if new and not is_on_record:
            self._log.append(b"".join(record.line() for record, _ in new))
        for record, meta in new:
            self._add(DeferredChange(record.info, meta, record.tokens))

    async def drain(self) -> None:
        """Send everything once. What fails stays on record."""
        while waiting := [entry for entry in self._by_key.values() if entry.error is None]:
            async with trio.open_nursery() as nursery:
                for entry in waiting:
                    nursery.start_soon(self._send, entry)

    def close(self) -> None:
        self._log.close(remove=not self._by_key and not self._taken)
