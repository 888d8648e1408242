"""Writes in one request: PUT of a file that is at most one part.

A small file in the page cache is read and summed in the event loop; the engine reads other files
from the disk. S3 compares a CRC32 with the bytes that it received.

A write whose answer was lost may have taken effect. Repeating the write does no harm, but its
condition may not hold any more: then the token in the metadata shows whether the object is from
this very write (fencing.py).
"""

from __future__ import annotations

import os

from fusefs.store.engine.engine import Completion, FileBody
from fusefs.store.errors import ConflictError
from fusefs.store.interface import (
    PLAIN,
    UNRECORDED,
    Expect,
    ObjectInfo,
    Strict,
    UploadLog,
    Write,
    writing,
)
from fusefs.store.s3 import head, multipart
from fusefs.store.s3.address import Call
from fusefs.store.s3.body import Sums, sums_of_body
from fusefs.store.s3.conditions import Fence, condition_headers
from fusefs.store.s3.documents import etag_in

# Files up to this size are read and summed in the event loop.
SMALL = 128 << 10


async def put_file(
    fence: Fence, key: str, fd: int, size: int, write: Write = PLAIN, log: UploadLog = UNRECORDED
) -> ObjectInfo:
    """Write a file as an object by one PUT, or by a multipart upload, which `log` records."""
    write = write.with_token(fence.tokens)
    if size <= fence.requester.settings.part_size:
        return await put(fence, key, fd, size, write)
    return await multipart.put(fence, key, fd, size, write, log)


async def put(fence: Fence, key: str, fd: int, size: int, write: Write) -> ObjectInfo:
    """Write the first `size` bytes of the file `fd` as the object `key`, by one PUT."""
    requester = fence.requester
    head.check(write.stamped(), write.content_type)

    async def send(strict: Strict) -> ObjectInfo:
        if size > SMALL:
            info = await _send(fence, key, FileBody(fd, 0, size), size, write, strict)
        else:
            async with requester.small_bodies:
                content = _read_now(fd, size)
                body = FileBody(fd, 0, size) if content is None else content
                info = await _send(fence, key, body, size, write, strict)
        requester.counted["bytes_sent"] += size
        return info

    if isinstance(write.condition, Expect):
        return await fence.over(key, write.condition, write.token, "PUT", send)
    return await fence.strictly(key, write.condition, send)


def _read_now(fd: int, size: int) -> bytearray | None:
    """Return the content of a small file; None if it is not in the page cache."""
    content = bytearray(size)
    try:
        if size and os.preadv(fd, [content], 0, os.RWF_NOWAIT) < size:
            return None
    except OSError:
        return None  # the content is on the disk, or on tmpfs
    return content


async def _send(
    fence: Fence, key: str, body: bytearray | FileBody, size: int, write: Write, condition: Strict
) -> ObjectInfo:
    requester, metadata = fence.requester, write.stamped()
    headers = head.metadata_headers(metadata, write.content_type) | condition_headers(condition)
    sums = Sums(0, None)

    async def call() -> Call:
        nonlocal sums
        # For each attempt: S3 has refused the content if the file has changed meanwhile.
        sums = await sums_of_body(body, with_md5=fence.sends_md5)
        return Call("PUT", "PUT", key, headers=headers | sums.headers(), body=body)

    def accept(answer: Completion) -> ObjectInfo:
        return ObjectInfo(
            key,
            size,
            etag_in(answer.headers.get("etag")),
            head.now_ns(),
            content_type=write.content_type,
            storage_class=requester.storage_class,
            version_id=answer.headers.get("x-amz-version-id"),
            metadata=metadata,
            crc32=sums.crc,
        )

    try:
        return await requester.send(call, accept, priority=writing, condition=condition)
    except ConflictError as error:
        there = await fence.find(key) if error.may_be_done else None
        if there is None or there.token != write.token:
            raise
        return there
