"""Single writes: PUT of a file that is one part.

A small file that is in the page cache is read and summed in the event loop; the engine reads
others from the disk. S3 compares a CRC32 with what has arrived.

A write whose answer was lost may have taken effect. Repeating it does no harm,
except that a condition need not hold any more: then the token in the metadata
shows whether the object is this very one (fencing.py).
"""

from __future__ import annotations

import os

from fusefs.store.engine.engine import Completion, FileBody
from fusefs.store.errors import AttemptError, ConflictError
from fusefs.store.interface import Expect, ObjectInfo, Strict, Write, writing
from fusefs.store.s3 import head
from fusefs.store.s3.address import Call
from fusefs.store.s3.body import Slice, sums_of
from fusefs.store.s3.conditions import Fence, condition_headers
from fusefs.store.s3.documents import no_result
from fusefs.store.s3.list import quoted
from fusefs.store.s3.requester import Requester

# What the event loop has the time to read and to sum.
SMALL = 128 << 10


async def put(fence: Fence, key: str, fd: int, size: int, write: Write) -> ObjectInfo:
    """As `Store.put_file`, with one PUT."""
    requester = fence.requester
    head.check(write.stamped(), write.content_type)

    async def send(strict: Strict) -> ObjectInfo:
        if size > SMALL:
            info = await _send(fence, key, Slice(fd, 0, size), write, strict)
        else:
            async with requester.small_bodies:
                content = _read_now(fd, size)
                body = Slice(fd, 0, size) if content is None else content
                info = await _send(fence, key, body, write, strict)
        requester.counted["bytes_sent"] += size
        return info

    if isinstance(write.condition, Expect):
        return await fence.over(key, write.condition, write.token, "PUT", send)
    return await fence.strictly(key, write.condition, send)


def _read_now(fd: int, size: int) -> bytearray | None:
    """Return the content of a small file, None if that is not in the page cache."""
    content = bytearray(size)
    try:
        if size and os.preadv(fd, [content], 0, os.RWF_NOWAIT) < size:
            return None
    except OSError:
        return None  # it is on the disk, or on tmpfs
    return content


async def _send(
    fence: Fence, key: str, body: bytearray | Slice, write: Write, condition: Strict
) -> ObjectInfo:
    requester, size, metadata = fence.requester, len(body), write.stamped()
    sent: bytearray | FileBody
    if isinstance(body, Slice):
        sent, sums = body.body, await body.sums(with_md5=fence.sends_md5)
    else:
        sent, sums = body, sums_of((body,), with_md5=fence.sends_md5)

    def accept(answer: Completion) -> ObjectInfo:
        etag = answer.headers.get("etag")
        if not etag:
            raise no_result()
        return ObjectInfo(
            key,
            size,
            quoted(etag),
            head.now_ns(),
            content_type=write.content_type,
            storage_class=requester.storage_class,
            version_id=answer.headers.get("x-amz-version-id"),
            metadata=metadata,
            crc32=sums.crc,
        )

    headers = head.metadata_headers(metadata, write.content_type)
    headers |= sums.headers() | condition_headers(condition)
    call = Call("PUT", "PUT", key, headers=headers, body=sent)
    try:
        return await requester.send(call, accept, priority=writing, condition=condition)
    except ConflictError as error:
        if error.may_be_done:
            info = await head.find(requester, key, size, metadata, sums.crc32)
            if info is not None:
                return info
        raise


async def compares_checksum(requester: Requester, key: str, fd: int, size: int, crc32: str) -> bool:
    """Send a body with another CRC32 (in base64) than its own; True if it is refused.

    Raises:
        StoreError: S3 could not tell.
    """
    headers = {"x-amz-checksum-crc32": crc32}
    call = Call("PUT", "PUT", key, headers=headers, body=FileBody(fd, 0, size))
    try:
        await requester.attempt(call)
    except AttemptError as error:
        if 400 <= error.failure.status < 500 and error.failure.status != 429:
            return True
        raise requester.failed(call, error.failure) from error
    return False
