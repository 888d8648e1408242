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

import trio

from fusefs.posix.metadata.attribute_log import AttributeLog, RecordedAttributes
from fusefs.posix.nodes.names import is_at_or_below
from fusefs.posix.nodes.object_metadata import Meta
from fusefs.posix.types import find
from fusefs.store.contract import Store
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.fencing import ChangeToken
from fusefs.store.interface import ObjectInfo
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
    """The objects that this mount has just put into the bucket, as they were put.

    Such an object has no tags and headers beside its content type, so that a
    copy of it with other metadata needs no HEAD before.
    """

    def __init__(self) -> None:
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


class DeferredAttributes:
    """The attributes of one mount's files that are to be sent. Belongs to the event loop.

    `copy` sends them with a token and returns the new version; `landed` is called with
    the old one and the new one, and `lost` if there is no such version any more.
    Where a late request may be to blame for that, the version `may_come_back`.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        log: AttributeLog,
        store: Store,
        copy: Callable[[ObjectInfo, Meta, ChangeToken], Awaitable[ObjectInfo]],
        landed: Callable[[ObjectInfo, ObjectInfo], Awaitable[None]],
        lost: Callable[[ObjectInfo], None],
        may_come_back: Callable[[ObjectInfo], Awaitable[bool]],
    ) -> None:
        self._nursery = nursery
        self._log = log
        self._store = store
        self._may_come_back = may_come_back
        self._copy = copy
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
        """Have a version's object say something, soon; on record when this returns.

        Raises:
            OSError: the disk does not take the record.
        """
        entry = self._by_key.get(info.key)
        if entry is not None and entry.info.etag == info.etag:
            self._log.put(RecordedAttributes(entry.info, meta.as_metadata(), entry.tokens))
            entry.meta = meta
            entry.changes += 1
            entry.token = None
        else:
            self._log.put(RecordedAttributes(info, meta.as_metadata()))
            self._add(DeferredChange(info, meta))

    def _note(self, record: RecordedAttributes) -> bool:
        """Put a change on record if the disk takes it; it is sent in any case."""
        try:
            self._log.put(record)
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
            await self.settle(entry.key)
            self.drop(entry.key)
            self._lost(entry.info)
        return len(given_up)

    def _note_done(self, key: str) -> None:
        self._note_less()
        self._log.done([key])
        remaining = [*self._taken, *self._by_key.values()]
        if not remaining or self._log.is_large:
            self._log.rewrite(entry.recorded() for entry in remaining)

    @asynccontextmanager
    async def taken(self, key: str) -> AsyncIterator[DeferredChange | None]:
        """Do what makes a change of attributes needless, or takes it along.

        No request for it is under way meanwhile. If that fails the change
        waits to be sent again.
        """
        await self.settle(key)
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

    async def settle(self, key: str) -> None:
        """Wait until no request for a key is under way."""
        while (entry := self._by_key.get(key)) is not None and entry.sending is not None:
            with waiting_for(entry.work):
                await entry.sending.wait()

    async def flush(self, key: str) -> None:
        """Have the bucket say what an object is to say.

        Raises:
            StoreError: it could not be sent; it stays on record.
        """
        while (entry := self._by_key.get(key)) is not None:
            entry.error = None
            await self._send(entry)
            if entry.error is not None:
                raise entry.error

    async def flush_below(self, prefix: str) -> None:
        """As `flush`, for everything below a prefix, or at it.

        Raises:
            StoreError: something could not be sent; the rest is.
        """
        errors: list[StoreError | OSError] = []

        async def flush(key: str) -> None:
            try:
                await self.flush(key)
            except (StoreError, OSError) as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for entry in self.pending(prefix):
                nursery.start_soon(flush, entry.key)
        if errors:
            raise errors[0]

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
                    self._nursery.start_soon(self._send_due, entry)
                else:
                    self._due.release()
        finally:
            self._is_running = False

    async def _send_due(self, entry: DeferredChange) -> None:
        try:
            await self._send_unattended(entry)
        finally:
            self._due.release()

    async def _send_unattended(self, entry: DeferredChange) -> None:
        """As `_send`, where the request that has begun this task does not wait for it."""
        with unattended():
            await self._send(entry)

    async def _send(self, entry: DeferredChange) -> None:
        """Send a change; one that is under way is waited for."""
        with waiting_for(entry.work):
            if entry.sending is not None:
                await entry.sending.wait()
                return
            with entry.work.doing():
                await self._begin_sending(entry)

    async def _begin_sending(self, entry: DeferredChange) -> None:
        entry.sending = trio.Event()
        try:
            async with self._at_once:
                if self._by_key.get(entry.key) is entry:
                    await self._send_now(entry)
        except trio.Cancelled:
            # The program that waited was killed. `_run` may have passed this change over, as it
            # was being sent. Not due at once: while the mount ends this is cancelled again.
            if self._by_key.get(entry.key) is entry:
                entry.due = trio.current_time() + DEFER_S
                self._wait_for(entry)
            raise
        finally:
            entry.sending.set()
            entry.sending = None

    async def _send_now(self, entry: DeferredChange) -> None:
        changes = entry.changes
        try:
            info = await self._copied(entry)
        except (NotFoundError, StaleVersionError) as error:
            if await self._is_lost_for_now(entry, error):
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

    async def _is_lost_for_now(self, entry: DeferredChange, error: StoreError) -> bool:
        """True if a version that is gone may come back, or that can't be known now."""
        try:
            if not await self._may_come_back(entry.info):
                return False
            error = StoreError(f"a late request may have undone it: {error}")
        except StoreError as unknown:
            error = unknown
        self._failed(entry, error)
        return True

    async def _copied(self, entry: DeferredChange) -> ObjectInfo:
        """Send a change; return the version that it has made.

        Where an earlier request was executed without an answer, it goes over what that
        one has made, which `entry` is about then.

        Raises:
            NotFoundError, StaleVersionError: the version is gone.
            StoreError: the bucket did not take it.
        """
        try:
            earlier = entry.tokens
            return await self._copy(entry.info, entry.meta, self._token_of(entry))
        except StaleVersionError:
            made = await self._store.head(entry.key) if earlier else None
            if made is None or str(made.token) not in earlier:
                raise
        with trio.CancelScope(shield=True):
            await self._landed(entry.info, made)
        entry.info, entry.tokens, entry.token = made, (), None
        if self._by_key.get(entry.key) is not entry:
            return made
        return await self._copy(entry.info, entry.meta, self._token_of(entry))

    def _token_of(self, entry: DeferredChange) -> ChangeToken:
        """The token of a request that is about to be sent, on record unless the disk is full.

        By that the next process knows what the request has made.
        """
        if entry.token is None:
            entry.token = self._store.tokens.next()
            entry.tokens = (*entry.tokens, str(entry.token))[-MOST_TOKENS:]
            try:
                self._log.put(entry.recorded())
            except OSError as error:
                logger.info("the token of %s is not on record: %s", entry.key, error.strerror)
        return entry.token

    async def is_about(self, entry: DeferredChange, info: ObjectInfo) -> bool:
        """True if a change is about a version, or an earlier request has made that one of it.

        Raises:
            StoreError: the bucket could not tell.
        """
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
        """Take up what an earlier process was to send.

        Raises:
            OSError: the disk does not take the record; nothing is taken up.
        """
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
