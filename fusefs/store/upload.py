"""A multipart upload: parts in parallel, each retried by itself.

Each part is sent with its CRC32, which S3 compares; the checksums of all parts
go into the request that completes the upload, so that S3 refuses an object
made of other parts than ours. A part that the bucket has is not sent again, if
the file still has its bytes.

When the answer to the completing request is lost, repeating it may say that
there is no such upload, or that the condition does not hold any more. Then the
object itself tells: it is ours if its size, its composed checksum and its
metadata are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from fusefs.store import listing, requests
from fusefs.store.base import Condition, ObjectInfo, ObjectVersion, Part, UploadState
from fusefs.store.body import Body, composed
from fusefs.store.errors import NotFoundError, StoreError
from fusefs.store.stream import AttemptError

if TYPE_CHECKING:
    from fusefs.store.clients import Clients
    from fusefs.store.s3 import S3Store

# Of one upload. Measured against a server with as many processors as the client
# has, 32 took a third longer than 12 to 20.
PARTS_AT_ONCE = 16


class S3Upload:
    """An upload under way; see `fusefs.store.base.Upload`."""

    def __init__(self, store: S3Store, state: UploadState, *, may_be_done: bool = False) -> None:
        self._store = store
        self._state = replace(state, parts=())
        self._parts = {part.number: part for part in state.parts}
        self._may_be_done = may_be_done
        self._object: ObjectInfo | None = None  # once it is known to be there

    @property
    def state(self) -> UploadState:
        return replace(self._state, parts=tuple(self._sorted_parts()))

    @property
    def part_count(self) -> int:
        return -(-self._state.size // self._state.part_size)

    def range_of(self, number: int) -> tuple[int, int]:
        """The bytes [start, stop) that a part has."""
        start = (number - 1) * self._state.part_size
        return start, min(start + self._state.part_size, self._state.size)

    async def send(self, fd: int, numbers: Iterable[int] | None = None) -> None:
        if self._object is None:
            wanted = range(1, self.part_count + 1) if numbers is None else numbers
            await self._in_parallel(partial(self._send_part, fd), wanted)

    async def copy_part(self, number: int, source: ObjectVersion, start: int, stop: int) -> None:
        first, last = self.range_of(number)
        if stop - start != last - first:
            raise ValueError(f"part {number} has {last - first} bytes, not {stop - start}")

        def work(clients: Clients) -> Part:
            answer = clients.s3.upload_part_copy(
                **clients.request,
                **self._named,
                PartNumber=number,
                CopySource={"Bucket": clients.request["Bucket"], "Key": source.key},
                CopySourceIfMatch=source.etag,
                CopySourceRange=f"bytes={start}-{stop - 1}",
            )
            result = answer.get("CopyPartResult", {})
            if not result.get("ETag"):
                raise requests.no_etag()
            etag = listing.quoted(result["ETag"])
            return Part(number, stop - start, etag, result.get("ChecksumCRC32", ""))

        if self._object is None:
            self._parts[number] = await self._store.retried(
                "COPY PART", self._state.key, work, requests.writing
            )

    async def copy_all(self, source: ObjectVersion) -> None:
        """Copy the parts from another object, byte for byte."""

        async def copy_one(number: int) -> None:
            await self.copy_part(number, source, *self.range_of(number))

        await self._in_parallel(copy_one, range(1, self.part_count + 1))

    async def complete(self, condition: Condition = None) -> ObjectInfo:
        if self._object is not None:
            return self._object
        if len(self._parts) < self.part_count:
            raise ValueError(f"{self.part_count - len(self._parts)} parts are missing")
        parts = [_in_completion(part) for part in self._sorted_parts()]
        may_be_done, self._may_be_done = self._may_be_done, True

        def work(clients: Clients) -> str:
            nonlocal may_be_done
            try:
                answer = clients.s3.complete_multipart_upload(
                    **clients.request,
                    **self._named,
                    **requests.conditions(condition),
                    MultipartUpload={"Parts": parts},
                )
            except Exception as error:
                failure = requests.judged(error, condition)
                if failure.code == "BadDigest":  # of a part, which will not change
                    failure = replace(failure, kind=StoreError, is_retryable=False)
                may_be_done |= failure.is_retryable
                raise AttemptError(failure) from error
            may_be_done = True
            if not answer.get("ETag"):
                raise requests.no_etag()
            return listing.quoted(answer["ETag"])

        try:
            etag = await self._store.retried("COMPLETE UPLOAD", self._state.key, work)
        except StoreError:
            self._object = await self._seen() if may_be_done else None
            if self._object is None:
                raise
        else:
            self._object = await self._seen() or self._unseen(etag)
        return self._object

    async def _seen(self) -> ObjectInfo | None:
        try:
            return await self.find()
        except StoreError:
            return None

    def _unseen(self, etag: str) -> ObjectInfo:
        """What is known of the object if it can't be seen, being replaced already, say."""
        state = self._state
        return ObjectInfo(state.key, state.size, etag, requests.now_ns(), metadata=state.metadata)

    async def find(self) -> ObjectInfo | None:
        """The object if this upload has been completed and nothing came after it."""
        checksums = [part.checksum for part in self._sorted_parts()]
        if len(checksums) < self.part_count:
            return None
        state = self._state
        told = {"ChecksumCRC32": composed(checksums)}

        def work(clients: Clients) -> ObjectInfo | None:
            return requests.find(clients, state.key, state.size, state.metadata, told)

        return await self._store.retried("HEAD", state.key, work)

    async def abort(self) -> None:
        """Give it up."""
        await abort(self._store, self._state.key, self._state.upload_id)

    async def look(self) -> None:
        """Find out what the bucket has of the upload.

        Raises:
            NotFoundError: there is no such upload, and no object of it.
        """
        try:
            listed = await self._list_parts()
        except NotFoundError:
            self._object = await self.find()
            if self._object is None:
                raise
            return
        recorded, self._parts = self._parts, {}
        for number, size, etag, checksum in listed:
            start, stop = self.range_of(number)
            known = recorded.get(number)
            # Not every store tells the checksums of parts.
            if not checksum and known is not None and known.etag == etag:
                checksum = known.checksum
            if size == stop - start and checksum:
                self._parts[number] = Part(number, size, etag, checksum)

    async def _list_parts(self) -> list[tuple[int, int, str, str]]:
        """Number, size, ETag and checksum (or "") of each part that the bucket has."""
        parts: list[tuple[int, int, str, str]] = []
        marker = 0

        def work(clients: Clients) -> Any:
            return clients.s3.list_parts(**clients.request, **self._named, PartNumberMarker=marker)

        while True:
            answer = await self._store.retried("LIST PARTS", self._state.key, work)
            for part in answer.get("Parts", []):
                etag = listing.quoted(part["ETag"])
                checksum = part.get("ChecksumCRC32", "")
                parts.append((part["PartNumber"], part["Size"], etag, checksum))
            if not answer.get("IsTruncated"):
                return parts
            marker = answer["NextPartNumberMarker"]

    async def _send_part(self, fd: int, number: int) -> None:
        body = Body(fd, *self.range_of(number))
        known = self._parts.get(number)
        if known is not None:
            body.begin()
            if known.checksum == await trio.to_thread.run_sync(body.checksum):
                return

        def work(clients: Clients) -> Part:
            checksum = body.checksum()
            answer = clients.s3.upload_part(
                **clients.request,
                **self._named,
                PartNumber=number,
                Body=body,
                ChecksumCRC32=checksum,
            )
            if not answer.get("ETag"):
                raise requests.no_etag()
            return Part(number, len(body), listing.quoted(answer["ETag"]), checksum)

        self._parts[number] = await self._store.retried(
            "PUT PART", self._state.key, work, requests.writing, transfer=body
        )
        self._store.note_sent(len(body))

    async def _in_parallel(
        self, work: Callable[[int], Awaitable[None]], numbers: Iterable[int]
    ) -> None:
        """Do `work` for each number; the first failure ends the others and is raised."""
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
            for _ in range(min(PARTS_AT_ONCE, self._store.settings.max_connections)):
                nursery.start_soon(run, nursery.cancel_scope)
        if failures:
            raise failures[0]

    @property
    def _named(self) -> dict[str, str]:
        return {"Key": self._state.key, "UploadId": self._state.upload_id}

    def _sorted_parts(self) -> list[Part]:
        return [self._parts[number] for number in sorted(self._parts)]


def _in_completion(part: Part) -> dict[str, Any]:
    checksum = {"ChecksumCRC32": part.checksum} if part.checksum else {}
    return {"PartNumber": part.number, "ETag": part.etag, **checksum}


async def abort(store: S3Store, key: str, upload_id: str) -> None:
    """Give an upload up and have its parts deleted; no error if there is none."""

    def work(clients: Clients) -> None:
        clients.s3.abort_multipart_upload(**clients.request, Key=key, UploadId=upload_id)

    with suppress(NotFoundError):
        await store.retried("ABORT UPLOAD", key, work)
