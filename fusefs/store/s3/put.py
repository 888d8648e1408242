"""Single writes: PUT of a file that is one part.

A small file that is in the page cache is read and summed in the event loop; the engine reads
others from the disk. S3 compares a CRC32 with what has arrived.

A write whose answer was lost may have taken effect. Repeating it does no harm,
except that a condition need not hold any more: then the token in the metadata
shows whether the object is this very one (fencing.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusefs.store.engine.engine import Completion, FileBody
from fusefs.store.errors import ConflictError, Failure, StoreError
from fusefs.store.interface import Expect, ObjectInfo, Strict, Write, writing
from fusefs.store.s3 import head
from fusefs.store.s3.address import Call
from fusefs.store.s3.body import Slice, Sums, sums_of
from fusefs.store.s3.conditions import Fence, condition_headers
from fusefs.store.s3.documents import no_result
from fusefs.store.s3.list import quoted
from fusefs.store.s3.requester import Requester

# What the event loop has the time to read and to sum.
SMALL = 128 << 10


@dataclass(frozen=True, slots=True)
class _Source:
    """A future object: the first `size` bytes of an open file, and its properties."""

    key: str
    fd: int
    size: int
    metadata: Mapping[str, str]
    content_type: str | None
    storage_class: str

    def info(self, answer: Completion, sums: Sums) -> ObjectInfo:
        """Return the object, as the answer and what was sent describe it.

        Raises:
            AttemptError: the answer has no ETag.
        """
        etag = answer.headers.get("etag")
        if not etag:
            raise no_result()
        return ObjectInfo(
            self.key,
            self.size,
            quoted(etag),
            head.now_ns(),
            content_type=self.content_type,
            storage_class=self.storage_class,
            version_id=answer.headers.get("x-amz-version-id"),
            metadata=self.metadata,
            crc32=sums.crc,
        )


async def put(
    requester: Requester,
    fence: Fence,
    key: str,
    fd: int,
    size: int,
    write: Write,
) -> ObjectInfo:
    """As `Store.put_file`, with one PUT."""
    metadata = write.stamped()
    head.check(metadata, write.content_type)
    source = _Source(key, fd, size, metadata, write.content_type, requester.storage_class)

    async def send(strict: Strict) -> ObjectInfo:
        info = await _put(requester, source, strict, sends_md5=fence.sends_md5)
        requester.counted["bytes_sent"] += size
        return info

    if isinstance(write.condition, Expect):
        return await fence.over(key, write.condition, write.token, "PUT", send)
    return await fence.strictly(key, write.condition, send)


async def _put(
    requester: Requester, source: _Source, condition: Strict, *, sends_md5: bool
) -> ObjectInfo:
    if source.size > SMALL:
        return await _send(requester, source, condition, sends_md5=sends_md5, content=None)
    places = requester.small_bodies
    if not places.value:
        await places.acquire()
    else:
        places.acquire_nowait()
    try:
        content = _read_now(source)
        return await _send(requester, source, condition, sends_md5=sends_md5, content=content)
    finally:
        places.release()


def _read_now(source: _Source) -> bytearray | None:
    """Return the content of a small file, None if that is not in the page cache."""
    content = bytearray(source.size)
    try:
        if source.size and os.preadv(source.fd, [content], 0, os.RWF_NOWAIT) < source.size:
            return None
    except OSError:
        return None  # it is on the disk, or on tmpfs
    return content


async def _send(
    requester: Requester,
    source: _Source,
    condition: Strict,
    *,
    sends_md5: bool,
    content: bytearray | None,
) -> ObjectInfo:
    body: bytearray | FileBody
    if content is not None:
        body, sums = content, sums_of((content,), with_md5=sends_md5)
    else:
        whole = Slice(source.fd, 0, source.size)
        body, sums = whole.body, await whole.sums(with_md5=sends_md5)
    headers = head.metadata_headers(source.metadata, source.content_type)
    headers |= sums.headers() | condition_headers(condition)
    try:
        return await requester.send(
            Call("PUT", "PUT", source.key, headers=headers, body=body),
            lambda answer: source.info(answer, sums),
            priority=writing,
            condition=condition,
        )
    except ConflictError as error:
        if error.may_be_done:
            size, metadata = source.size, source.metadata
            info = await head.find(requester, source.key, size, metadata, sums.crc32)
            if info is not None:
                return info
        raise


async def compares_checksum(requester: Requester, key: str, fd: int, size: int, crc32: str) -> bool:
    """As `S3Store.compares_checksum`."""
    headers = {"x-amz-checksum-crc32": crc32}
    call = Call("PUT", "PUT", key, headers=headers, body=FileBody(fd, 0, size))
    refused = False

    async def judge(failure: Failure) -> Failure:
        nonlocal refused
        refused = 400 <= failure.status < 500
        # It was sent for that.
        kind = ConflictError if refused else failure.kind
        return replace(failure, kind=kind, is_retryable=failure.is_retryable and not refused)

    try:
        await requester.send(call, lambda _: None, judge=judge)
    except StoreError:
        if not refused:
            raise
    return refused
