"""Finds out what a store honours, by trying it with throw-away objects.

That a store ignores a condition no answer tells: it does what it should have
refused. So each condition is sent once where it does not hold and, where that
is refused, once where it holds; a checksum is sent that is not the body's. That
is some 50 requests, on objects of one byte below a name of the mount's prefix
that no mount lists (`PROBE_NAME`). They are deleted at the end;
what a probe that was killed has left, a later one deletes.

A condition that the store does not implement counts as not honoured. What
could not be tried is not known (None), and nothing relies on it.

Of a thousand nodes that mount at once each would send these requests at once, more
than S3 takes of changes below one prefix, and what it refuses would slow down all that
the nodes read. So a probe begins a moment after its mount, and later where others are under way.
"""

from __future__ import annotations

import base64
import logging
import os
import random
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from fusefs.settings.types import ConditionalWrites
from fusefs.store import capabilities
from fusefs.store.capabilities import PROBE_NAME, SHOWN, Capabilities
from fusefs.store.errors import (
    AccessDeniedError,
    ConflictError,
    NotFoundError,
    StoreError,
    UnsupportedError,
)
from fusefs.store.interface import IF_ABSENT, Condition, IfMatch, ObjectInfo, Store, Upload, Write

if TYPE_CHECKING:
    from fusefs.store.s3.store import S3Store

logger = logging.getLogger("fusefs.store")

# A probe takes a second. What is this much older than the bucket's clock belongs to none.
LEFT_NS = 10 * 60 * 1_000_000_000
CLEANING_TIME_S = 5.0
# How long after a probe that failed the next one comes.
AGAIN_S = 300.0
# Within what time after the mount a probe begins; and the next look where more than FEW are
# under way, so many times at most: what looks like one may have been left.
FIRST_S, NEXT_S = 1.0, 60.0
FEW, LOOKS = 8, 5
# No object has these.
_OTHER_ETAG = '"00000000000000000000000000000000"'
_OTHER_CRC32 = base64.b64encode(b"\1\2\3\4").decode()
_BODY = b"?"


class Prober:
    """Has one mount's store know its capabilities. Belongs to the event loop.

    `directory` keeps what was found, by `identity`. `why_not` says why this
    mount tries nothing, "" where it does.
    """

    def __init__(
        self, store: S3Store, prefix: str, directory: Path, identity: str, why_not: str
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._directory = directory
        self._identity = identity
        self._is_passive = bool(why_not)
        if why_not:
            store.fence.why_unknown = why_not

    async def recall(self) -> None:
        """Know what was found in the last day, if anything was."""
        if self._store.fence.mode != ConditionalWrites.AUTO:
            return
        found = await trio.to_thread.run_sync(capabilities.load, self._directory, self._identity)
        if found is not None:
            self._take(found)

    async def require_strict(self) -> None:
        """Refuse a mount with `--conflict fail` where that can't hold; probes if need be.

        Raises:
            UnsupportedError: the store is known to ignore a condition that this needs.
        """
        if self._wants_to_know:
            try:
                await self._probe()
            except StoreError as error:
                logger.warning("whether --conflict fail holds could not be tried: %s", error)
        lacking = self._store.capabilities.lacking_for_strict
        if lacking:
            raise UnsupportedError(
                "--conflict fail can't hold: this store ignores the condition of some writes "
                f"({', '.join(lacking)}); mount with --conflict overwrite"
            )

    async def run(self, *, fails_on_conflict: bool) -> None:
        """Probe if need be, say what that means, and return."""
        if self._wants_to_know:
            await take_turn(self._store, self._prefix)
        while self._wants_to_know:
            try:
                await self._probe()
            except AccessDeniedError as error:
                self._store.fence.why_unknown = str(error)
                logger.info("what the store honours could not be tried: %s", error)
                break
            except StoreError as error:
                self._store.fence.why_unknown = str(error)
                logger.info("what the store honours is tried again later: %s", error)
                await trio.sleep(AGAIN_S)
        found = self._store.capabilities
        if found.put_if_none_match is False:
            logger.warning(
                "this store ignores If-None-Match: where two mounts create a file with O_EXCL"
                " at the same time, both succeed"
            )
        if fails_on_conflict and found.lacking_for_strict:
            logger.error(
                "--conflict fail does not hold: this store ignores %s",
                ", ".join(found.lacking_for_strict),
            )

    @property
    def _wants_to_know(self) -> bool:
        fence = self._store.fence
        is_auto = fence.mode == ConditionalWrites.AUTO
        return is_auto and not self._is_passive and not fence.capabilities.is_known

    async def _probe(self) -> None:
        found = await probe(self._store, self._prefix)
        self._take(found)
        if found.is_known:
            await trio.to_thread.run_sync(capabilities.save, self._directory, self._identity, found)
        elif self._store.fence.capabilities.checksums is None:
            self._is_passive = True  # trying again would not tell more
            self._store.fence.why_unknown = "the store did not answer clearly"

    def _take(self, found: Capabilities) -> None:
        self._store.fence.capabilities = found
        if found.missing:
            logger.info("this store lacks: %s", ", ".join(SHOWN[name] for name in found.missing))


async def take_turn(store: Store, prefix: str) -> None:
    """Return after a while that is another for each mount, once few probes are under way."""
    longest_s = FIRST_S
    for _ in range(LOOKS):
        await trio.sleep(random.uniform(0, longest_s))
        above = f"{prefix}{PROBE_NAME}/"
        try:
            page = await store.list_page(above, delimiter="")
        except StoreError:
            return  # the probe tells what is wrong
        if len({info.key[len(above) :].partition("/")[0] for info in page.objects}) <= FEW:
            return
        longest_s = NEXT_S


async def probe(store: S3Store, prefix: str) -> Capabilities:
    """Try what the store honours below a prefix ("" or ending in a slash).

    Cancelled, it deletes what it has made, within CLEANING_TIME_S.

    Raises:
        StoreError: it may not write there, or the store can't be reached.
    """
    fd = os.memfd_create("fusefs-probe", os.MFD_CLOEXEC)
    try:
        os.write(fd, _BODY)
        one = _Probe(store, f"{prefix}{PROBE_NAME}/", fd)
        try:
            return await one.run()
        finally:
            with trio.move_on_after(CLEANING_TIME_S, shield=True):
                await one.clean_up()
    finally:
        os.close(fd)


class _Probe:
    """One series of tries with keys of its own."""

    def __init__(self, store: S3Store, above: str, fd: int) -> None:
        self._store = store
        self._above = above
        self._own = f"{above}{secrets.token_hex(8)}/"
        self._fd = fd
        # The one that has not been completed yet, and what is copied.
        self._upload: Upload | None = None
        self._source: ObjectInfo | None = None
        self._has_written = False

    async def run(self) -> Capabilities:
        """Try all of it."""
        await self._put("object")
        self._has_written = True
        found = Capabilities(checksums=await self._compares_checksums())
        for part in (self._puts, self._completions, self._copies, self._deletes, self._markers):
            found = await part(found)
        return found

    async def _puts(self, found: Capabilities) -> Capabilities:
        return replace(
            found,
            put_if_none_match=await self._is_refused(lambda: self._put("object", IF_ABSENT))
            and await self._is_done(lambda: self._put("new", IF_ABSENT)),
            put_if_match=await self._honours_match("object", self._put),
        )

    async def _completions(self, found: Capabilities) -> Capabilities:
        return replace(
            found,
            complete_if_none_match=await self._is_refused(
                lambda: self._complete("object", IF_ABSENT)
            ),
            complete_if_match=await self._honours_match("object", self._complete),
        )

    async def _copies(self, found: Capabilities) -> Capabilities:
        return replace(
            found,
            copy_if_none_match=await self._is_refused(lambda: self._copy("object", IF_ABSENT))
            and await self._is_done(lambda: self._copy("copy", IF_ABSENT)),
            copy_if_match=await self._honours_match("object", self._copy),
        )

    async def _deletes(self, found: Capabilities) -> Capabilities:
        one, two = await self._put("one"), await self._put("two")
        etags = {one.key: _OTHER_ETAG, two.key: two.etag}
        failures = await self._store.delete_many(etags, etags)
        is_honoured = await self._is_there("one") and not await self._is_there("two")
        return replace(
            found,
            delete_if_match=await self._honours_delete("object"),
            delete_many_etags=is_honoured and not failures,
        )

    async def _markers(self, found: Capabilities) -> Capabilities:
        made = await self._put("dir/")
        found_marker = await self._store.head(made.key)
        return replace(
            found,
            marker_metadata=found_marker.token == made.token,
            marker_if_none_match=await self._is_refused(lambda: self._put("dir/", IF_ABSENT)),
            marker_if_match=await self._honours_match("dir/", self._put),
            marker_delete_if_match=await self._honours_delete("dir/"),
        )

    # One try each

    async def _put(self, name: str, condition: Condition = None) -> ObjectInfo:
        size = 0 if name.endswith("/") else len(_BODY)
        return await self._store.put_file(
            self._own + name, self._fd, size, Write(condition=condition)
        )

    async def _complete(self, name: str, condition: Condition = None) -> ObjectInfo:
        if self._upload is None:
            self._upload = await self._store.begin_upload(self._own + name)
            await self._upload.send(self._fd, [1], len(_BODY))
        made = await self._upload.complete(len(_BODY), condition)
        self._upload = None
        return made

    async def _copy(self, name: str, condition: Condition = None) -> ObjectInfo:
        if self._source is None:
            self._source = await self._put("source")
        return await self._store.copy(self._source, self._own + name, Write(condition=condition))

    async def _compares_checksums(self) -> bool | None:
        """Whether a body with another CRC32 than its own is refused; None if that stays open."""
        return await self._store.compares_checksum(self._own + "damaged", _BODY, _OTHER_CRC32)

    # What came of it

    async def _honours_match(
        self, name: str, write: Callable[[str, Condition], Awaitable[ObjectInfo]]
    ) -> bool:
        """Whether a write over another ETag is refused, and one over the right ETag is done."""
        if not await self._is_refused(lambda: write(name, IfMatch(_OTHER_ETAG))):
            return False
        etag = (await self._store.head(self._own + name)).etag
        return await self._is_done(lambda: write(name, IfMatch(etag)))

    async def _honours_delete(self, name: str) -> bool:
        key = self._own + name
        await self._store.delete(key, _OTHER_ETAG)
        if not await self._is_there(name):
            return False
        await self._store.delete(key, (await self._store.head(key)).etag)
        return not await self._is_there(name)

    async def _is_refused(self, write: Callable[[], Awaitable[object]]) -> bool:
        try:
            await write()
        except ConflictError:
            return True
        except UnsupportedError:
            pass
        return False

    async def _is_done(self, write: Callable[[], Awaitable[object]]) -> bool:
        return not await self._is_refused(write)

    async def _is_there(self, name: str) -> bool:
        try:
            await self._store.head(self._own + name)
        except NotFoundError:
            return False
        return True

    # Afterwards

    async def clean_up(self) -> None:
        """Delete what this probe has made, and what earlier ones have left."""
        if not self._has_written:
            return
        if self._upload is not None:
            state = self._upload.state
            with suppress(StoreError):
                await self._store.abort_upload(state.key, state.upload_id)
        now_ns = 0
        try:
            page = await self._store.list_page(self._above, delimiter="")
            now_ns = max((info.mtime_ns for info in page.objects), default=0)
            unwanted = [
                info.key
                for info in page.objects
                if info.key.startswith(self._own) or info.mtime_ns < now_ns - LEFT_NS
            ]
            # Some servers show a prefix of deleted objects until it is deleted itself.
            failures = await self._store.delete_many([*unwanted, self._own])
            for failure in failures:
                raise StoreError(str(failure.error))
        except StoreError as error:
            logger.warning("objects are left below %s, and removed later: %s", self._above, error)
        with suppress(StoreError):  # the credentials need not allow to list uploads
            for lost in await self._store.list_uploads(self._above):
                if lost.begun_ns < now_ns - LEFT_NS:
                    await self._store.abort_upload(lost.key, lost.upload_id)
