"""Checks of uncertain keys, and repairs of changes that a late request has undone.

uncertain_keys.py explains late requests, the times of checks, and expected states.
A repair is sent like any other change: on the condition that the key still has the state that
was found, if the store honours conditions, and recorded while it is under way. So a repair
without an answer makes the key uncertain again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial

import trio

from fusefs.linux.files import closing
from fusefs.posix.late.request_log import COPY, DELETE, PUT, Change
from fusefs.posix.late.uncertain_keys import (
    ABSENT,
    Absent,
    CheckResult,
    KeyState,
    UnansweredRequest,
    UncertainKey,
    UncertainKeys,
    boottime,
)
from fusefs.posix.late.watched_store import WatchedStore
from fusefs.posix.tasks import for_each
from fusefs.store.errors import ConflictError, NotFoundError, StaleVersionError, StoreError
from fusefs.store.fencing import ChangeToken
from fusefs.store.interface import IfMatch, ObjectInfo, Write
from fusefs.store.s3.head import sendable

logger = logging.getLogger("fusefs.late")

AT_ONCE = 8
# The pause before another check of a key whose HEAD failed.
RETRY_S = 5.0
# The least time between two looks for keys that are due, of which there may be thousands.
LOOK_S = 0.1
# The most attempts at a check of a key that keeps changing during repairs.
TRIES = 3


class Repairer:
    """Checks and repairs the uncertain keys of one mount.

    `changed` is called with a repaired key and its new object, None if the key was removed.
    """

    def __init__(
        self, store: WatchedStore, changed: Callable[[str, ObjectInfo | None], None]
    ) -> None:
        self._store = store
        self._uncertain_keys: UncertainKeys = store.uncertain_keys
        self._changed = changed
        self._busy: set[UncertainKey] = set()
        self._fetching = trio.Semaphore(2)  # a content may have gigabytes
        # The times before which keys are not checked again, because their HEADs failed.
        self._failed: dict[UncertainKey, float] = {}

    async def run(self) -> None:
        """Check each uncertain key when it is due, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._uncertain_keys.woken = trio.Event()
                now = boottime()
                self._failed = {one: at for one, at in self._failed.items() if not one.is_over}
                times = {
                    one: max(self._uncertain_keys.due_at(one), self._failed.get(one, 0.0))
                    for one in self._uncertain_keys
                    if one not in self._busy
                }
                due = [one for one, at in times.items() if at <= now]
                if due:
                    # Not awaited: other keys do not wait until a large content is downloaded.
                    self._busy.update(due)
                    nursery.start_soon(for_each, self._check_safely, due, AT_ONCE)
                else:
                    with trio.move_on_after(min(times.values(), default=float("inf")) - now):
                        await self._uncertain_keys.woken.wait()
                await trio.sleep(LOOK_S)

    async def _check_safely(self, one: UncertainKey) -> None:
        try:
            await self.check(one)
        except StoreError as error:
            self._failed[one] = boottime() + RETRY_S
            logger.info("%s could not be looked at again: %s", one.key, error)
        except Exception:  # a fault with one key must not stop the checks of the others
            logger.exception("%s could not be looked at again", one.key)
            self._uncertain_keys.note_checked(one)
        finally:
            self._busy.discard(one)
            self._uncertain_keys.woken.set()

    async def check(self, entry: UncertainKey) -> None:
        """Check a key, and restore its expected state if a late request has undone it."""
        async with entry.lock:
            for _ in range(TRIES):
                if entry.is_over:
                    return
                if entry.is_harmless or await self._is_right(entry):
                    break
            if not entry.is_over:
                self._uncertain_keys.note_checked(entry)
        if not entry.is_over and not entry.is_harmless:
            async with self._fetching:
                await self._store.fetch_content(entry)

    async def _is_right(self, entry: UncertainKey) -> bool:
        """Check a key once, and repair it; False if the key changed and has to be checked again."""
        found = await self._store.current_state(entry.key)
        result = entry.check(found)
        if result == CheckResult.FOREIGN:
            logger.info("%s is somebody else's by now", entry.key)
            self._uncertain_keys.expect(entry, None, None)
        if result == CheckResult.NEWER:  # else a rename of the directory would wait for the old one
            await self._store.adopt(entry, found)
        if result != CheckResult.UNDONE:
            return True
        if isinstance(entry.expected, Absent) and entry.key.endswith("/"):
            page = await self._store.list_page(entry.key, delimiter="", max_keys=2)
            if any(info.key != entry.key for info in page.objects):
                return True  # the directory has other objects than its marker by now
        try:
            made = await self._put_back(entry, found)
        except (ConflictError, StaleVersionError, NotFoundError):
            return False  # another change was faster
        except LookupError as error:
            logger.error("%s was undone by a late request, for good: %s", entry.key, error)
            self._uncertain_keys.expect(entry, None, None)
            return True
        self._uncertain_keys.repairs += 1
        what = "is removed again" if made is None else "is put back"
        logger.warning("%s was undone by a late request of this mount, and %s", entry.key, what)
        self._changed(entry.key, made)
        return True

    async def _put_back(self, entry: UncertainKey, found: KeyState) -> ObjectInfo | None:
        """Restore a locked key's expected state; return the new object, None if none is expected.

        Raises:
            LookupError: the local disk does not have the content any more.
            ConflictError, StaleVersionError, NotFoundError: the key has changed since it was
                `found`, or its expected state has changed meanwhile.
            StoreError: the request failed.
        """
        key, expected = entry.key, entry.expected
        if isinstance(expected, Absent):
            assert isinstance(found, ObjectInfo)
            change = Change(DELETE, key)
            await self._store.recorded(change, partial(self._store.inner.delete, key, found.etag))
            self._expect(entry, expected, ABSENT, None, change)
            return None
        assert expected is not None
        token = self._store.tokens.next()
        has_content = isinstance(found, ObjectInfo) and found.etag == expected.etag
        change = Change(COPY if has_content else PUT, key, (str(token),))
        send = partial(self._put_content, entry, expected, found, token)
        if isinstance(found, ObjectInfo) and has_content:
            write = Write(sendable(expected.metadata or {}), token=token)
            send = partial(self._store.inner.copy, found, key, write)
        made = await self._store.recorded(change, send)
        self._expect(entry, expected, made, entry.content, change)
        return made

    def _expect(
        self,
        entry: UncertainKey,
        expected: KeyState,
        made: KeyState,
        content: str | None,
        change: Change,
    ) -> None:
        """Record `made`, the state that the repair `change` gave a key, as the expected state.

        `content` is the content's file. ConflictError if the key has another expected state than
        `expected` by now: the repair has undone a newer change, and counts as a late request.
        """
        if entry.expected is not expected:
            # This repair has undone another change, which was acknowledged meanwhile.
            entry.unanswered.append(UnansweredRequest(change, is_newer=False))
            self._uncertain_keys.record(entry)
            raise ConflictError(f"{entry.key} was changed while it was put back")
        self._uncertain_keys.expect(entry, made, content)

    async def _put_content(
        self, entry: UncertainKey, expected: ObjectInfo, found: KeyState, token: ChangeToken
    ) -> ObjectInfo:
        if entry.content is None and expected.size:
            raise LookupError("its content is not on the local disk")
        path = (
            os.devnull if entry.content is None else self._uncertain_keys.directory / entry.content
        )
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LookupError(f"its content can't be read: {error}") from error
        with closing(fd):
            etag = found.etag if isinstance(found, ObjectInfo) else None
            write = Write(
                sendable(expected.metadata or {}),
                expected.content_type,
                self._store.inner.fence.sent("PUT", IfMatch(etag)),
                token,
            )
            return await self._store.inner.put_file(entry.key, fd, expected.size, write)
