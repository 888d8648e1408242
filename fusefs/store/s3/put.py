"""Single writes: PUT of a file that is one part.

A small file that is in the page cache is sent from the event loop
(store/http/async_exchange.py). What that can't do, a larger file, a failure, is
sent in a thread with retries: as directly as possible (store/http/client.py),
and by boto3 where the answer is odd. S3 compares a CRC32 with what has arrived.

A write whose answer was lost may have taken effect. Repeating it does no harm,
except that a condition need not hold any more: then the token in the metadata
shows whether the object is this very one (fencing.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusefs.store.errors import AttemptError, ConflictError, Failure
from fusefs.store.interface import Expect, ObjectInfo, Strict, Write, writing
from fusefs.store.s3 import head
from fusefs.store.s3.body import Body, Sums, sums_of
from fusefs.store.s3.conditions import (
    Fence,
    condition_headers,
    condition_parameters,
    interpret,
)
from fusefs.store.s3.list_parser import quoted
from fusefs.store.s3.requester import Requester

if TYPE_CHECKING:
    from fusefs.store.s3.clients import Clients

# What the event loop has the time to read, to sum and to send.
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

    def headers(self, condition: Strict, sums: Sums) -> dict[str, str]:
        headers = {f"{head.META}{name}": value for name, value in self.metadata.items()}
        headers |= sums.headers()
        if self.content_type is not None:
            headers["content-type"] = self.content_type
        return headers | condition_headers(condition) if condition else headers

    def info(self, etag: str | None, version_id: str | None, crc: int | None = None) -> ObjectInfo:
        """The object, from what the answer says, and the CRC32 that was sent if it is known.

        Raises:
            AttemptError: it has no ETag.
        """
        if not etag:
            raise head.no_etag()
        return ObjectInfo(
            self.key,
            self.size,
            quoted(etag),
            head.now_ns(),
            content_type=self.content_type,
            storage_class=self.storage_class,
            version_id=version_id,
            metadata=self.metadata,
            crc32=crc,
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
    may_be_done = source.size <= SMALL
    if may_be_done:
        places = requester.small_bodies
        if not places.value:
            await places.acquire()
        else:
            places.acquire_nowait()
        try:
            info = await _put_from_memory(requester, source, condition, sends_md5=sends_md5)
        finally:
            places.release()
        if info is not None:
            return info
    one = _Put(source, condition, may_be_done=may_be_done, sends_md5=sends_md5)
    return await requester.with_retries("PUT", source.key, one.run, writing, transfer=one.body)


async def _put_from_memory(
    requester: Requester, source: _Source, condition: Strict, *, sends_md5: bool
) -> ObjectInfo | None:
    """Send a small file from the event loop; None if a thread is to send it."""
    data = bytearray(source.size)
    try:
        if source.size and os.preadv(source.fd, [data], 0, os.RWF_NOWAIT) < source.size:
            return None
    except OSError:
        return None  # it is on the disk, or on tmpfs
    sums = sums_of((data,), with_md5=sends_md5)
    headers = source.headers(condition, sums)
    answer = await requester.send_now(
        "PUT", source.key, headers=headers, body=data, priority=writing, condition=condition
    )
    if answer is None:
        return None
    etag, version_id = answer.headers.get("etag"), answer.headers.get("x-amz-version-id")
    return source.info(etag, version_id, sums.crc)


class _Put:
    """One PUT over several attempts. `may_be_done`: an earlier one may have taken effect."""

    def __init__(
        self, source: _Source, condition: Strict, *, may_be_done: bool, sends_md5: bool
    ) -> None:
        self.body = Body(source.fd, 0, source.size)
        self._source = source
        self._condition = condition
        self._may_be_done = may_be_done
        self._sends_md5 = sends_md5

    def run(self, clients: Clients) -> ObjectInfo:
        """Send it. Blocks.

        Raises:
            AttemptError: S3 did not take it.
        """
        source = self._source
        try:
            sums = self.body.sums(with_md5=self._sends_md5)
            answer = clients.direct.send(
                "PUT", source.key, body=self.body, headers=source.headers(self._condition, sums)
            )
            if answer is None:
                return self._through_boto(clients, sums)
            return source.info(answer.headers.get("etag"), answer.headers.get("x-amz-version-id"))
        except Exception as error:
            failure = interpret(error, self._condition)
            if self._may_be_done and issubclass(failure.kind, ConflictError):
                checksum = {"ChecksumCRC32": self.body.checksum()}
                info = head.find(clients, source.key, source.size, source.metadata, checksum)
                if info is not None:
                    return info
            self._may_be_done |= failure.is_retryable
            raise AttemptError(failure) from error

    def _through_boto(self, clients: Clients, sums: Sums) -> ObjectInfo:
        self.body.seek(0)
        source = self._source
        answer = clients.s3.put_object(
            **clients.request,
            **head.metadata_parameters(source.metadata, source.content_type),
            **condition_parameters(self._condition),
            **sums.parameters(),
            Key=source.key,
            Body=self.body,
        )
        return source.info(answer.get("ETag"), answer.get("VersionId"))


async def compares_checksum(requester: Requester, key: str, fd: int, size: int, crc32: str) -> bool:
    """As `S3Store.compares_checksum`."""
    body = Body(fd, 0, size)

    def work(clients: Clients) -> Failure | None:
        headers = {"x-amz-checksum-crc32": crc32}
        body.seek(0)
        try:
            if clients.direct.send("PUT", key, body=body, headers=headers) is None:
                clients.s3.put_object(**clients.request, Key=key, Body=body, ChecksumCRC32=crc32)
        except Exception as error:  # anything may come from botocore and what it uses
            return interpret(error)
        return None

    failure = await requester.with_retries("PUT", key, work, transfer=body)
    return failure is not None and 400 <= failure.status < 500
