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
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from fusefs.posix.metadata.attribute_log import AttributeLog, Recorded
from fusefs.posix.metadata.object_metadata import Meta
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.interface import ObjectInfo

logger = logging.getLogger("fusefs.attributes")

DEFER_S = 1.0
# How often what failed is tried again.
RETRY_S = 5.0
AT_ONCE = 16
# How long what was put here counts as not having been described by others, and how many do.
OWN_S = 30.0
MOST_OWN = 4096


class Deferred:
    """What one object is to say; `info` is the version that it is about.

    `since` and `due` are in trio's seconds. `sending` is set while a request is
    under way, and `error` is what the last one failed with. `changes` counts
    how often it was changed.
    """

    __slots__ = ("changes", "due", "error", "info", "meta", "sending", "since")

    def __init__(self, info: ObjectInfo, meta: Meta) -> None:
        self.info = info
        self.meta = meta
        self.changes = 0
        self.since = trio.current_time()
        self.due = self.since + DEFER_S
        self.sending: trio.Event | None = None
        self.error: Exception | None = None

    @property
    def key(self) -> str:
        return self.info.key

    def size(self) -> int:
        """The bytes that wait to be sent, which are none."""
        return 0

    def recorded(self) -> Recorded:
        return Recorded(self.info, self.meta.as_metadata())


class OwnObjects:
    """What this mount has just put into the bucket, as it was put.

    Such an object has no tags and headers beside its content type, so that a
    copy of it with other metadata needs no HEAD before.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[float, ObjectInfo]] = OrderedDict()

    def note(self, info: ObjectInfo) -> None:
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

    `copy` sends them and returns the new version; `landed` is called with the
    old one and the new one, and `lost` if there is no such version any more.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        log: AttributeLog,
        copy: Callable[[ObjectInfo, Meta], Awaitable[ObjectInfo]],
        landed: Callable[[ObjectInfo, ObjectInfo], Awaitable[None]],
        lost: Callable[[ObjectInfo], None],
    ) -> None:
        self._nursery = nursery
        self._log = log
        self._copy = copy
        self._landed = landed
        self._lost = lost
        self._by_key: dict[str, Deferred] = {}
        # What goes along with a change that is under way: on record until that is done.
        self._taken: set[Deferred] = set()
        # By when each is due; what was sent or taken meanwhile is passed over.
        self._queue: list[tuple[float, int, Deferred]] = []
        self._numbers = itertools.count()
        self._is_running = False
        self._is_sooner = trio.Event()
        self._at_once = trio.CapacityLimiter(AT_ONCE)

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, info: ObjectInfo) -> Meta | None:
        """What a version is to say; None if that is what its object says."""
        found = self._by_key.get(info.key)
        return found.meta if found is not None and found.info.etag == info.etag else None

    def has(self, key: str) -> bool:
        return key in self._by_key

    def pending(self, key: str) -> list[Deferred]:
        """What waits of a file, or of what is below a prefix ("": of everything)."""
        if not self._by_key:
            return []
        below = key if not key or key.endswith("/") else key + "/"
        return [one for one in self._by_key.values() if one.key == key or one.key.startswith(below)]

    # Changing

    def put(self, info: ObjectInfo, meta: Meta) -> None:
        """Have a version's object say something, soon; on record when this returns.

        Raises:
            OSError: the disk does not take the record.
        """
        one = self._by_key.get(info.key)
        is_known = one is not None and one.info.etag == info.etag
        self._log.put(Recorded(one.info if one and is_known else info, meta.as_metadata()))
        if one is not None and is_known:
            one.meta = meta
            one.changes += 1
        else:
            self._add(Deferred(info, meta))

    def _note(self, one: Recorded) -> None:
        """Put a change on record if the disk takes it; it is sent in any case."""
        try:
            self._log.put(one)
        except OSError as error:
            logger.warning(
                "the attributes of %s are not on record, and lost if this process dies: %s",
                one.info.key, error.strerror,
            )  # fmt: skip

    def _add(self, one: Deferred) -> None:
        self._by_key[one.key] = one
        self._wait_for(one)

    def _wait_for(self, one: Deferred) -> None:
        if self._queue and one.due < self._queue[0][0]:
            self._is_sooner.set()
        heapq.heappush(self._queue, (one.due, next(self._numbers), one))
        if not self._is_running:
            self._is_running = True
            self._nursery.start_soon(self._run)

    def renamed(self, key: str, info: ObjectInfo | None) -> None:
        """What was changed while an object got another key is the new object's."""
        one = self._by_key.pop(key, None)
        if one is not None:
            if info is not None:
                new = Deferred(info, one.meta)
                self._note(new.recorded())
                self._add(new)
            self._note_done(key)

    def drop(self, key: str) -> None:
        """What an object was to say is of no meaning any more."""
        if self._by_key.pop(key, None) is not None:
            self._note_done(key)

    def _note_done(self, key: str) -> None:
        self._log.done([key])
        left = [*self._taken, *self._by_key.values()]
        if not left or self._log.is_large:
            self._log.rewrite(one.recorded() for one in left)

    @asynccontextmanager
    async def taken(self, key: str) -> AsyncIterator[Deferred | None]:
        """Do what makes a change of attributes needless, or takes it along.

        No request for it is under way meanwhile. If that fails the change
        waits to be sent again.
        """
        await self.settle(key)
        one = self._by_key.pop(key, None)
        if one is None:
            yield None
            return
        self._taken.add(one)
        is_done = False
        try:
            yield one
            is_done = True
        finally:
            self._taken.remove(one)
            if key not in self._by_key:
                if is_done:
                    self._note_done(key)
                else:
                    self._add(one)

    # Sending

    async def settle(self, key: str) -> None:
        """Wait until no request for a key is under way."""
        while (one := self._by_key.get(key)) is not None and one.sending is not None:
            await one.sending.wait()

    async def flush(self, key: str) -> None:
        """Have the bucket say what an object is to say.

        Raises:
            StoreError: it could not be sent; it stays on record.
        """
        while (one := self._by_key.get(key)) is not None:
            one.error = None
            await self._send(one)
            if one.error is not None:
                raise one.error

    async def flush_below(self, prefix: str) -> None:
        """As `flush`, for everything below a prefix, or at it.

        Raises:
            StoreError: something could not be sent; the rest is.
        """
        errors: list[StoreError] = []

        async def flush(key: str) -> None:
            try:
                await self.flush(key)
            except StoreError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for one in self.pending(prefix):
                nursery.start_soon(flush, one.key)
        if errors:
            raise errors[0]

    def hurry(self, key: str) -> None:
        """Have everything at or below a key sent now."""
        for one in self.pending(key):
            one.error = None
            self._nursery.start_soon(self._send, one)

    async def _run(self) -> None:
        """Send what is due, until there is nothing left."""
        try:
            while self._queue:
                due, _, one = self._queue[0]
                if due > trio.current_time():
                    self._is_sooner = trio.Event()
                    with trio.move_on_at(due):
                        await self._is_sooner.wait()
                    continue
                heapq.heappop(self._queue)
                if self._by_key.get(one.key) is one and one.sending is None:
                    self._nursery.start_soon(self._send, one)
        finally:
            self._is_running = False

    async def _send(self, one: Deferred) -> None:
        """Send a change; one that is under way is waited for."""
        if one.sending is not None:
            await one.sending.wait()
            return
        one.sending = trio.Event()
        try:
            async with self._at_once:
                if self._by_key.get(one.key) is one:
                    await self._send_now(one)
        except trio.Cancelled:
            # The program that waited was killed. `_run` may have passed this change over, as it
            # was being sent. Not due at once: while the mount ends this is cancelled again.
            if self._by_key.get(one.key) is one:
                one.due = trio.current_time() + DEFER_S
                self._wait_for(one)
            raise
        finally:
            one.sending.set()
            one.sending = None

    async def _send_now(self, one: Deferred) -> None:
        old, changes = one.info, one.changes
        try:
            info = await self._copy(one.info, one.meta)
        except (NotFoundError, StaleVersionError):
            logger.warning("%s was replaced or removed: its attributes are given up", one.key)
            self.drop(one.key)
            self._lost(old)
        except (StoreError, OSError) as error:
            if one.error is None:
                logger.warning("the attributes of %s are not in the bucket yet: %s", one.key, error)
            one.error = error
            one.due = trio.current_time() + RETRY_S
            self._wait_for(one)
        else:
            if one.changes == changes:
                self.drop(one.key)
            else:
                one.info, one.error = info, None
                one.due = trio.current_time() + DEFER_S
                self._note(one.recorded())
                self._wait_for(one)
            await self._landed(old, info)

    # Another process's

    def adopt(self, one: Recorded, meta: Meta) -> None:
        """Take up what an earlier process was to send."""
        if one.info.key not in self._by_key:
            self._note(one)
            self._add(Deferred(one.info, meta))

    async def drain(self) -> None:
        """Send everything once. What fails stays on record."""
        while waiting := [one for one in self._by_key.values() if one.error is None]:
            async with trio.open_nursery() as nursery:
                for one in waiting:
                    nursery.start_soon(self._send, one)

    def close(self) -> None:
        """The mount has ended."""
        self._log.close(remove=not self._by_key and not self._taken)
