"""Multipart uploads: parts of a file that may grow, sent in parallel, each with its own retries.

Each part is sent with its CRC32, which S3 compares. The CRC32s of all parts go into the request
that completes the upload, so that S3 refuses parts that this process did not send or verify. Parts
that another process sent count only after they have been compared with the file.

If the answer to the completing request is lost, a HEAD of the key shows the result: the object is
this upload's if its size and its token (fencing.py) are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar
from urllib.parse import unquote

import trio

from fusefs.store.engine.engine import Completion, FileBody
from fusefs.store.errors import NotFoundError, StoreError, UnsupportedError, from_code
from fusefs.store.fencing import ChangeToken
from fusefs.store.interface import (
    PLAIN,
    UNRECORDED,
    Condition,
    Expect,
    ObjectInfo,
    ObjectVersion,
    Part,
    PendingUpload,
    Strict,
    UploadLog,
    UploadState,
    Write,
    writing,
)
from fusefs.store.s3 import documents, head
from fusefs.store.s3.address import Call
from fusefs.store.s3.body import sums_of_body
from fusefs.store.s3.conditions import Fence, condition_headers
from fusefs.store.s3.list import quoted, text_of
from fusefs.store.s3.requester import Requester

T = TypeVar("T")

# Parts of one upload that are sent at a time. Measured against a server with as many processors as
# the client, 32 took a third longer than 12 to 20.
PARTS_AT_ONCE = 16
# S3 copies parts of up to 5 GiB; smaller ones are copied in parallel.
COPY_PART = 128 << 20
ABORT_TIME_S = 5.0
# S3 takes 10,000 parts of up to 5 GiB.
MOST_PARTS = 10_000
# Number of parts of the same size before the size doubles.
ALIKE = 1_000
LARGEST = 4 << 30


class Schedule:
    """The offsets and sizes of a file's parts, counted from 1; the first ones have `first` bytes.

    Neither depends on the file's size, which is unknown while the file is written: the size of
    parts doubles after each thousand. With first parts of 8 MiB, 10,000 parts hold 8 TiB, and all
    parts of a file of 8 GB have the first size.
    """

    def __init__(self, first: int) -> None:
        # The size of the parts of each thousand, and the offset at which the thousand begins.
        self._sizes = [min(first << thousand, LARGEST) for thousand in range(MOST_PARTS // ALIKE)]
        self._starts = [0, *accumulate(ALIKE * size for size in self._sizes)]

    def size_of(self, number: int) -> int:
        """Return the size of any part but the last; a ValueError if `number` is not 1 to 10,000."""
        if not 1 <= number <= MOST_PARTS:
            raise ValueError(f"there is no part {number}")
        return self._sizes[(number - 1) // ALIKE]

    def part_at(self, offset: int) -> int:
        """Return the number of the part with this byte; a ValueError beyond the last part."""
        if offset >= self._starts[-1]:
            raise ValueError("the file is too large for S3")
        thousand = bisect_right(self._starts, offset) - 1
        behind = offset - self._starts[thousand]
        return thousand * ALIKE + behind // self._sizes[thousand] + 1

    def count(self, size: int) -> int:
        """Return the number of parts of a file of `size` bytes."""
        return self.part_at(size - 1) if size else 0

    def range_of(self, number: int, size: int) -> tuple[int, int]:
        """Return a part's bytes [start, stop); a ValueError if the file has no such part."""
        length, (thousand, behind) = self.size_of(number), divmod(number - 1, ALIKE)
        start = self._starts[thousand] + behind * length
        if start >= size:
            raise ValueError(f"a file of {size} bytes has no part {number}")
        return start, min(start + length, size)


class Upload:
    """A multipart upload under way, of a file that may still grow. Belongs to the event loop.

    The offsets of parts do not depend on the file's size (`Schedule`). S3 charges for the space of
    an upload until it is completed or aborted.
    """

    def __init__(self, fence: Fence, state: UploadState, *, is_resumed: bool = False) -> None:
        self._fence = fence
        self._requester = fence.requester
        self._state = state._replace(parts=())
        self._token = ChangeToken.parse(state.metadata)
        self._schedule = Schedule(state.part_size)
        self.part_at = self._schedule.part_at
        self.part_range = self._schedule.range_of
        self.part_count = self._schedule.count
        # Parts in the bucket that equal the file's, and parts that are not compared yet.
        self._parts: dict[int, Part] = {}
        self._unverified = {part.number: part for part in state.parts}
        # Numbers of the parts being sent and not dropped since. One task at a time sends a part.
        self._valid: set[int] = set()
        self._turns: defaultdict[int, trio.Lock] = defaultdict(trio.Lock)
        self._may_be_done = is_resumed
        self._object: ObjectInfo | None = None  # set once the object is known to exist

    @property
    def state(self) -> UploadState:
        """The state to record so that another process can resume; it changes with each part."""
        parts = self._unverified | self._parts
        return self._state._replace(parts=tuple(parts[number] for number in sorted(parts)))

    def has(self, number: int) -> bool:
        """True if the part is in the bucket (sent, copied or verified), and not dropped since."""
        return number in self._parts

    def missing(self, size: int) -> list[int]:
        """Return the numbers of the parts of a file of `size` bytes still to be sent or copied."""
        numbers = range(1, self.part_count(size) + 1)
        return [number for number in numbers if not self._fits(self._parts.get(number), size)]

    def drop(self, number: int) -> None:
        """Forget a part that was sent or is being sent: the file has changed in these bytes."""
        self._parts.pop(number, None)
        self._unverified.pop(number, None)
        self._valid.discard(number)

    async def send(self, fd: int, numbers: Iterable[int], size: int) -> None:
        """Send these parts of a file of `size` bytes, in parallel, unless they have been sent.

        Parts that another task is sending are waited for. After the return, also by cancellation,
        `fd` is not used any more, and finished parts remain valid.

        Raises:
            StoreError: a part could not be sent, or the file is shorter than `size`.
            ValueError: a file of `size` bytes has no such part.
        """
        await self._in_parallel(partial(self._send_part, fd, size), numbers)

    async def copy_part(self, number: int, source: ObjectVersion, start: int, stop: int) -> None:
        """Copy [start, stop) of `source` on the server as a part; only the last part may be short.

        Raises:
            StaleVersionError: the source is no longer this version.
            UnsupportedError: some stores would take another key as source (`is_mistakable`).
            ValueError: the range is larger than the part.
        """
        if is_mistakable(source.key):
            raise UnsupportedError("the store may copy from another object")
        await self._copy_part(number, source, start, stop)

    async def _copy_part(self, number: int, source: ObjectVersion, start: int, stop: int) -> None:
        if stop - start > self._schedule.size_of(number):
            raise ValueError(f"part {number} has fewer than {stop - start} bytes")
        headers = {
            "x-amz-copy-source": head.copy_source(self._requester.settings.bucket, source.key),
            "x-amz-copy-source-if-match": source.etag,
            "x-amz-copy-source-range": f"bytes={start}-{stop - 1}",
        }
        call = self._call("COPY PART", "PUT", {"partNumber": number}, headers=headers)

        def accept(answer: Completion) -> Part:
            result = documents.read(answer, "CopyPartResult")
            etag = documents.etag_in(text_of(result, "ETag"))
            return Part(number, stop - start, etag, text_of(result, "ChecksumCRC32"))

        copy = partial(self._requester.send, call, accept, priority=writing)
        await self._obtain(number, copy, lambda: False)

    async def copy_all(self, source: ObjectVersion) -> None:
        """Copy all missing parts on the server from `source`, each from the same offset."""

        async def copy_one(number: int) -> None:
            await self._copy_part(number, source, *self.part_range(number, source.size))

        await self._in_parallel(copy_one, self.missing(source.size))

    async def verify(self, fd: int, size: int) -> None:
        """Compare the parts in the bucket with the file of `size` bytes, and drop different ones.

        After the return, also by cancellation, `fd` is not used any more.

        Raises:
            NotFoundError: the upload has been completed, but with other bytes than the file's.
            StoreError: the file is shorter than `size`.
        """

        async def compare(number: int) -> None:
            part = self._unverified.get(number)
            is_same = False
            if part is not None and self._fits(part, size):
                sums = await sums_of_body(self._body(fd, number, size), with_md5=False)
                is_same = sums.crc32 == part.checksum
            # The part may have been dropped or sent meanwhile.
            if part is not None and self._unverified.pop(number, None) is part and is_same:
                self._parts[number] = part

        self._unverified, self._parts = self._unverified | self._parts, {}
        await self._in_parallel(compare, list(self._unverified))
        done = self._object
        if done is not None and (done.size != size or self.missing(size)):
            raise NotFoundError("the upload has been completed with other bytes")

    async def complete(self, size: int, condition: Condition = None) -> ObjectInfo:
        """Make the object of the first `size` bytes; even a cancelled call may make the object.

        Raises:
            ConflictError: the condition does not hold.
            NotFoundError: the upload was aborted.
            PartsError: the store makes no object of these parts (Ceph's gateway, if more were
                sent). A new upload must be begun.
            ValueError: parts are missing or not verified, or `size` is 0.
        """
        missing = self.missing(size)
        if missing or not size:
            raise ValueError(f"{len(missing)} parts are missing")
        if not isinstance(condition, Expect):
            return await self._complete(size, condition)
        key, operation, send = self._state.key, "CompleteMultipartUpload", self._complete
        return await self._fence.over(key, condition, self._token, operation, partial(send, size))

    async def _complete(self, size: int, condition: Strict) -> ObjectInfo:
        if self._object is not None and self._object.size == size:
            return self._object
        used = [self._parts[number] for number in range(1, self.part_count(size) + 1)]
        may_be_done, self._may_be_done = self._may_be_done, True
        headers, document = condition_headers(condition), documents.completion(used)
        call = self._call("COMPLETE UPLOAD", "POST", headers=headers, document=document)

        def accept(answer: Completion) -> str:
            nonlocal may_be_done
            result = documents.read(answer, "CompleteMultipartUploadResult")
            may_be_done = True
            if result.find("{*}ETag") is None:
                raise documents.no_result()
            # Ceph's gateway may give no ETag in its answer; no object has the ETag "".
            return quoted(text_of(result, "ETag"))

        async def judge(failure: StoreError) -> StoreError:
            if failure.s3_code == "BadDigest":  # a part's checksum, which stays the same
                return failure.of_kind(StoreError, is_retryable=False)
            if failure.status == 500 and await self._is_gone():
                return from_code("NoSuchUpload")
            return failure

        try:
            etag = await self._requester.send(call, accept, condition=condition, judge=judge)
        except StoreError as error:
            may_be_done |= error.may_be_done
            self._object = await self._seen(size, condition) if may_be_done else None
            if self._object is None:
                raise
        else:
            # If the object can't be seen, it may have been replaced already.
            key, storage_class = self._state.key, self._requester.storage_class
            self._object = await self._seen(size, condition) or ObjectInfo(
                key, size, etag, head.now_ns(), storage_class, metadata=self._state.metadata
            )
        return self._object

    async def _is_gone(self) -> bool:
        """True if there is no such upload: then Ceph's gateway answers its completion with 500."""
        try:
            await self._requester.attempt(self._call("LIST PARTS", "GET", {"max-parts": 1}))
        except StoreError as error:
            return isinstance(error, NotFoundError)
        return False

    async def _seen(self, size: int, condition: Strict) -> ObjectInfo | None:
        """Return the object of `size` bytes made by this upload; None if S3 does not show it."""
        with suppress(StoreError):
            found = await self._find(condition, size)
            return found if found is not None and found.size == size else None
        return None

    async def _find(self, condition: Strict = None, size: int = 0) -> ObjectInfo | None:
        """Return the object at the upload's key if this upload made it, else None.

        An object without room for a token is known by its metadata, and by its ETag, which ends
        with the number of parts of a file of `size` bytes and is not the one that was replaced.
        """
        found = await self._fence.find(self._state.key)
        if found is None:
            return None
        if self._token is not None:
            return found if found.token == self._token else None
        is_new = condition is not None and found.etag != condition.etag
        is_alike = found.etag.endswith(f'-{self.part_count(size)}"')
        return found if is_new and is_alike and found.metadata == self._state.metadata else None

    async def discover(self) -> None:
        """Find out which parts of the upload the bucket has, or that the upload was completed.

        Raises:
            NotFoundError: there is no such upload, and no object made by it.
        """
        recorded, self._unverified = self._unverified, {}
        try:
            listed = await self._list_parts()
        except NotFoundError:
            await self._look_for_object(recorded)
            return
        for part in listed:
            known = recorded.get(part.number)
            # Not every store lists the checksums of parts.
            if not part.checksum and known is not None and known.etag == part.etag:
                part = part._replace(checksum=known.checksum)
            if part.checksum:
                self._unverified[part.number] = part

    async def _look_for_object(self, recorded: Mapping[int, Part]) -> None:
        """Keep the object that an upload, now gone, has become: of the parts `recorded`, by number.

        Raises:
            NotFoundError: the key has no object that was made of these parts.
        """
        found = await self._find()
        size = 0 if found is None else found.size
        used = {number: part for number, part in recorded.items() if self._fits(part, size)}
        if not used or len(used) < self.part_count(size):
            raise NotFoundError("the upload has been aborted")
        self._object, self._unverified = found, used

    async def _list_parts(self) -> list[Part]:
        """Return the upload's parts that the bucket has."""
        call = partial(self._call, "LIST PARTS", "GET")
        return await _listed(self._requester, call, documents.parts)

    async def _send_part(self, fd: int, size: int, number: int) -> None:
        body = self._body(fd, number, size)
        crc32 = ""

        async def call() -> Call:
            nonlocal crc32
            # For each attempt: S3 has refused the part if the file has changed meanwhile.
            sums = await sums_of_body(body, with_md5=self._fence.sends_md5)
            query, headers, crc32 = {"partNumber": number}, sums.headers(), sums.crc32
            return self._call("PUT PART", "PUT", query, headers=headers, body=body)

        def accept(answer: Completion) -> Part:
            return Part(number, body.length, documents.etag_in(answer.headers.get("etag")), crc32)

        async def send() -> Part:
            part = await self._requester.send(call, accept, priority=writing)
            self._requester.counted["bytes_sent"] += body.length
            return part

        await self._obtain(number, send, lambda: self._fits(self._parts.get(number), size))

    async def _obtain(
        self, number: int, obtain: Callable[[], Awaitable[Part]], is_there: Callable[[], bool]
    ) -> None:
        """Make a part by `obtain` unless it `is_there`; forget the result if `drop` was called."""
        async with self._turns[number]:
            if number in self._valid and is_there():
                return
            self.drop(number)
            self._valid.add(number)
            part = await obtain()
            if number in self._valid:
                self._parts[number] = part

    def _body(self, fd: int, number: int, size: int) -> FileBody:
        start, stop = self.part_range(number, size)
        return FileBody(fd, start, stop - start)

    def _fits(self, part: Part | None, size: int) -> bool:
        """True if `part` has the size of the part with its number in a file of `size` bytes."""
        if part is None or part.number > self.part_count(size):
            return False
        start, stop = self.part_range(part.number, size)
        return part.size == stop - start

    async def _in_parallel(
        self, work: Callable[[int], Awaitable[None]], numbers: Iterable[int]
    ) -> None:
        """Call `work` for each number; the first failure cancels the other calls and is raised."""
        failures: list[Exception] = []
        waiting = iter(numbers)

        async def run(scope: trio.CancelScope) -> None:
            for number in waiting:
                try:
                    await work(number)
                except Exception as error:
                    failures.append(error)
                    scope.cancel()
                    return

        async with trio.open_nursery() as nursery:
            for _ in range(min(PARTS_AT_ONCE, self._requester.settings.max_connections)):
                nursery.start_soon(run, nursery.cancel_scope)
        if failures:
            raise failures[0]

    def _call(
        self, operation: str, method: str, query: Mapping[str, Any] | None = None, **more: Any
    ) -> Call:
        """Return a `Call`, not sent yet, about this upload; `more` are fields of the `Call`."""
        query = {**(query or {}), "uploadId": self._state.upload_id}
        return Call(operation, method, self._state.key, query, **more)


def is_mistakable(key: str) -> bool:
    """True if `key` has a percent-encoded character, so that decoding gives another key.

    For copied parts, Ceph's gateway decodes the source's key twice, and ignores the condition.
    """
    return unquote(key) != key


async def abort(requester: Requester, key: str, upload_id: str) -> None:
    """Abort an upload, which deletes its parts; no error if there is no such upload."""
    call = Call("ABORT UPLOAD", "DELETE", key, {"uploadId": upload_id})
    with suppress(NotFoundError):
        await requester.send(call, lambda _: None)


async def put(
    fence: Fence, key: str, fd: int, size: int, write: Write, log: UploadLog = UNRECORDED
) -> ObjectInfo:
    """Write `size` bytes of a file as the object `key` by a multipart upload; `log` records it."""
    async with _aborted_on_failure(fence.requester, await begin(fence, key, write), log) as upload:
        await upload.send(fd, upload.missing(size), size)
        return await upload.complete(size, write.condition)


async def copy(
    fence: Fence,
    source: ObjectVersion,
    key: str,
    headers: Mapping[str, str],
    metadata: Mapping[str, str],
    condition: Condition,
    log: UploadLog,
) -> ObjectInfo:
    """Copy an object that is too large for one request; `headers` and `metadata` are the copy's.

    Raises:
        UnsupportedError: some stores would copy another object in its place (`is_mistakable`).
    """
    other = unquote(source.key)
    if is_mistakable(source.key) and await fence.find(other) is not None:
        raise UnsupportedError(f"the store may copy {other} in its place")
    begun = await _begin(fence, key, COPY_PART, headers, metadata)
    async with _aborted_on_failure(fence.requester, begun, log) as upload:
        await upload.copy_all(source)
        return await upload.complete(source.size, condition)


@asynccontextmanager
async def _aborted_on_failure(
    requester: Requester, upload: Upload, log: UploadLog
) -> AsyncIterator[Upload]:
    key, upload_id = upload.state.key, upload.state.upload_id
    log.begun(key, upload_id)
    try:
        yield upload
    except BaseException:
        is_aborted = False
        with trio.move_on_after(ABORT_TIME_S, shield=True), suppress(StoreError):
            await abort(requester, key, upload_id)
            is_aborted = True
        if is_aborted:
            log.ended(upload_id)
        else:
            log.add(key, upload_id)
        raise
    log.ended(upload_id)


async def begin(fence: Fence, key: str, write: Write = PLAIN) -> Upload:
    """Begin a multipart upload of a file of any size; `Upload.complete` makes it an object."""
    metadata = write.with_token(fence.tokens).stamped()
    head.check(metadata, write.content_type)
    kept = {} if write.content_type is None else {"content-type": write.content_type}
    return await _begin(fence, key, fence.requester.settings.part_size, kept, metadata)


async def _begin(
    fence: Fence, key: str, part_size: int, headers: Mapping[str, str], metadata: Mapping[str, str]
) -> Upload:
    sent = {**head.metadata_headers(metadata, None), **headers, "x-amz-checksum-algorithm": "CRC32"}
    call = Call("BEGIN UPLOAD", "POST", key, {"uploads": ""}, sent)
    upload_id = await fence.requester.send(call, documents.upload_id)
    return Upload(fence, UploadState(key, upload_id, part_size, metadata))


async def resume(fence: Fence, state: UploadState) -> Upload:
    """Resume a recorded upload: find its parts, or its object (`Store.resume_upload`)."""
    upload = Upload(fence, state, is_resumed=True)
    await upload.discover()
    return upload


async def pending(requester: Requester, prefix: str) -> list[PendingUpload]:
    """Return the multipart uploads of all clients below `prefix`."""
    query = {"uploads": "", "prefix": prefix, "encoding-type": "url"}

    def call(start: Mapping[str, str]) -> Call:
        return Call("LIST UPLOADS", "GET", query={**query, **start})

    return await _listed(requester, call, documents.uploads)


async def _listed(
    requester: Requester,
    call: Callable[[dict[str, str]], Call],
    read: Callable[[Completion], tuple[list[T], dict[str, str] | None]],
) -> list[T]:
    """Return the entries of all pages; `read` gives a page's, and the start for the next `call`."""
    found, following = await requester.send(call({}), read)
    while (start := following) is not None:
        page, following = await requester.send(call(start), read)
        if following == start:  # the next page would be this page again
            raise UnsupportedError(documents.ODD_LISTING)
        found += page
    return found
