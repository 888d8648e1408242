"""Single writes: PUT of a file that is one part.

A small file that is in the page cache is sent from the event loop (store/http/async_exchange.py).
What that can't, a larger file, a failure, is sent in a thread with patience: as
directly as possible (store/http/client.py), and by boto3 where the key or the answer is
odd. S3 compares a CRC32 with what has arrived.

A write whose answer was lost may have taken effect. Repeating it does no harm,
except that a condition need not hold any more: then the token in the metadata
tells whether the object is this very one (fencing.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fusefs.store.errors import ConflictError
from fusefs.store.fencing import ChangeToken
from fusefs.store.interface import Condition, Expect, ObjectInfo, Strict
from fusefs.store.s3 import head, list_parser
from fusefs.store.s3.body import Body, Sums, sums_of
from fusefs.store.s3.get import Attempt, AttemptError, is_plain

if TYPE_CHECKING:
    from fusefs.store.s3.clients import Clients
    from fusefs.store.s3.store import S3Store

# What the event loop has the time to read, to sum and to send.
SMALL = 128 << 10


# --- PUT ------------------------------------------------------------------------


async def put(
    store: S3Store,
    key: str,
    fd: int,
    size: int,
    metadata: Mapping[str, str],
    content_type: str | None,
    condition: Condition,
) -> ObjectInfo:
    """As `Store.put_file`, with one PUT."""
    head.check(metadata, content_type)

    async def send(strict: Strict) -> ObjectInfo:
        return await _put(store, key, fd, size, metadata, content_type, strict)

    if isinstance(condition, Expect):
        return await store.fence.over(key, condition, ChangeToken.parse(metadata), "put", send)
    return await send(condition)


async def _put(
    store: S3Store, key: str, fd: int, size: int, metadata: Mapping[str, str],
    content_type: str | None, condition: Strict,
) -> ObjectInfo:  # fmt: skip
    may_be_done = False
    if size <= SMALL and is_plain(key):
        info = await _put_at_once(store, key, fd, size, metadata, content_type, condition)
        if info is not None:
            store.note_sent(size)
            return info
        may_be_done = True
    one = _Put(
        key, Body(fd, 0, size), metadata, content_type, condition, may_be_done=may_be_done,
        sends_md5=store.sends_md5,
    )  # fmt: skip
    info = await store.retried("PUT", key, one.run, head.writing, transfer=one)
    store.note_sent(size)
    return info


async def _put_at_once(
    store: S3Store, key: str, fd: int, size: int, metadata: Mapping[str, str],
    content_type: str | None, condition: Strict,
) -> ObjectInfo | None:  # fmt: skip
    # So many have their bytes in memory at a time; the others have theirs on the disk.
    places = store.small_writes
    if not places.value:
        await places.acquire()
    else:
        places.acquire_nowait()
    try:
        return await _put_from_memory(store, key, fd, size, metadata, content_type, condition)
    finally:
        places.release()


async def _put_from_memory(
    store: S3Store, key: str, fd: int, size: int, metadata: Mapping[str, str],
    content_type: str | None, condition: Strict,
) -> ObjectInfo | None:  # fmt: skip
    data = bytearray(size)
    try:
        if size and os.preadv(fd, [data], 0, os.RWF_NOWAIT) < size:
            return None
    except OSError:
        return None  # it is on the disk, or on tmpfs
    sums = sums_of((data,), with_md5=store.sends_md5)
    headers = _headers(metadata, content_type, condition, sums)
    answer = await store.at_once(
        "PUT", key, headers=headers, body=data, priority=head.writing, condition=condition
    )
    if answer is None:
        return None
    etag, version_id = answer.headers.get("etag"), answer.headers.get("x-amz-version-id")
    return _info(key, size, etag, version_id, metadata, content_type)


def _headers(
    metadata: Mapping[str, str], content_type: str | None, condition: Strict, sums: Sums
) -> dict[str, str]:
    """What goes with a body."""
    headers = {f"x-amz-meta-{name}": value for name, value in metadata.items()}
    headers |= sums.headers()
    if content_type is not None:
        headers["content-type"] = content_type
    return headers | head.condition_headers(condition) if condition else headers


def _info(
    key: str, size: int, etag: str | None, version_id: str | None,
    metadata: Mapping[str, str], content_type: str | None,
) -> ObjectInfo:  # fmt: skip
    if not etag:
        raise head.no_etag()
    return ObjectInfo(
        key, size, list_parser.quoted(etag), head.now_ns(),
        content_type=content_type, version_id=version_id, metadata=metadata,
    )  # fmt: skip


class _Put:
    """One PUT over several attempts."""

    def __init__(
        self,
        key: str,
        body: Body,
        metadata: Mapping[str, str],
        content_type: str | None,
        condition: Strict,
        *,
        may_be_done: bool,
        sends_md5: bool,
    ) -> None:
        self._key = key
        self._body = body
        self._metadata = metadata
        self._content_type = content_type
        self._condition = condition
        self._may_be_done = may_be_done
        self._sends_md5 = sends_md5

    def begin(self) -> Attempt:
        return self._body.begin()

    def has_progressed(self) -> bool:
        return False

    def run(self, clients: Clients) -> ObjectInfo:
        """Send it. Blocks.

        Raises:
            AttemptError: S3 did not take it.
        """
        try:
            sums = self._body.sums(with_md5=self._sends_md5)
            return self._directly(clients, sums) or self._through_boto(clients, sums)
        except Exception as error:
            failure = head.judged(error, self._condition)
            if self._may_be_done and issubclass(failure.kind, ConflictError):
                info = head.find(
                    clients,
                    self._key,
                    len(self._body),
                    self._metadata,
                    {"ChecksumCRC32": self._body.checksum()},
                )
                if info is not None:
                    return info
            self._may_be_done |= failure.is_retryable
            raise AttemptError(failure) from error

    def _directly(self, clients: Clients, sums: Sums) -> ObjectInfo | None:
        if not is_plain(self._key):
            return None
        answer = clients.direct.send(
            "PUT", self._key, body=self._body,
            headers=_headers(self._metadata, self._content_type, self._condition, sums),
        )  # fmt: skip
        if answer is None:
            self._body.seek(0)
            return None
        return self._info(answer.headers.get("etag"), answer.headers.get("x-amz-version-id"))

    def _through_boto(self, clients: Clients, sums: Sums) -> ObjectInfo:
        answer = clients.s3.put_object(
            **clients.request,
            **head.headers(self._metadata, self._content_type),
            **head.conditions(self._condition),
            **sums.parameters(),
            Key=self._key,
            Body=self._body,
        )
        return self._info(answer.get("ETag"), answer.get("VersionId"))

    def _info(self, etag: str | None, version_id: str | None) -> ObjectInfo:
        return _info(
            self._key, len(self._body), etag, version_id, self._metadata, self._content_type
        )
