"""Single writes: PUT of a file that is one part, and deletes.

A small file that is in the page cache is sent from the event loop (quick.py).
What that can't, a larger file, a condition, a failure, is sent in a thread with
patience: as directly as possible (direct.py), and by boto3 where the key or the
answer is odd. S3 compares a CRC32 with what has arrived.

A write whose answer was lost may have taken effect. Repeating it does no harm,
except that a condition need not hold any more: then the checksum and the
metadata of the object tell whether it is ours.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fusefs.store import listing, requests
from fusefs.store.base import (
    IF_ABSENT,
    Condition,
    DeleteFailure,
    IfMatch,
    ObjectInfo,
)
from fusefs.store.body import Body, encoded
from fusefs.store.errors import (
    ConflictError,
    Failure,
    StoreError,
    from_code,
)
from fusefs.store.stream import Attempt, AttemptError, is_plain

if TYPE_CHECKING:
    from fusefs.store.clients import Clients
    from fusefs.store.s3 import S3Store

# What the event loop has the time to read, to sum and to send.
SMALL = 128 << 10
DELETES_AT_ONCE = 1000
# Characters that a DeleteObjects request, XML 1.0, has no way to write.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


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
    requests.check(metadata, content_type)
    if size <= SMALL and condition is None and is_plain(key):
        info = await _put_at_once(store, key, fd, size, metadata, content_type)
        if info is not None:
            store.note_sent(size)
            return info
    one = _Put(key, Body(fd, 0, size), metadata, content_type, condition)
    info = await store.retried("PUT", key, one.run, requests.writing, transfer=one)
    store.note_sent(size)
    return info


async def _put_at_once(
    store: S3Store, key: str, fd: int, size: int, metadata: Mapping[str, str],
    content_type: str | None,
) -> ObjectInfo | None:  # fmt: skip
    data = bytearray(size)
    try:
        if size and os.preadv(fd, [data], 0, os.RWF_NOWAIT) < size:
            return None
    except OSError:
        return None  # it is on the disk, or on tmpfs
    headers = _headers(metadata, content_type, None, encoded(zlib.crc32(data).to_bytes(4, "big")))
    answer = await store.at_once("PUT", key, headers=headers, body=data, priority=requests.writing)
    if answer is None:
        return None
    etag, version_id = answer.headers.get("etag"), answer.headers.get("x-amz-version-id")
    return _info(key, size, etag, version_id, metadata, content_type)


def _headers(
    metadata: Mapping[str, str], content_type: str | None, condition: Condition, checksum: str
) -> dict[str, str]:
    """What goes with a body."""
    headers = {f"x-amz-meta-{name}": value for name, value in metadata.items()}
    headers["x-amz-checksum-crc32"] = checksum
    if content_type is not None:
        headers["content-type"] = content_type
    if isinstance(condition, IfMatch):
        headers["if-match"] = condition.etag
    elif condition == IF_ABSENT:
        headers["if-none-match"] = "*"
    return headers


def _info(
    key: str, size: int, etag: str | None, version_id: str | None,
    metadata: Mapping[str, str], content_type: str | None,
) -> ObjectInfo:  # fmt: skip
    if not etag:
        raise requests.no_etag()
    return ObjectInfo(
        key, size, listing.quoted(etag), requests.now_ns(),
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
        condition: Condition,
    ) -> None:
        self._key = key
        self._body = body
        self._metadata = metadata
        self._content_type = content_type
        self._condition = condition
        self._may_be_done = False

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
            checksum = self._body.checksum()
            return self._directly(clients, checksum) or self._through_boto(clients, checksum)
        except Exception as error:
            failure = requests.judged(error, self._condition)
            if self._may_be_done and issubclass(failure.kind, ConflictError):
                info = requests.find(
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

    def _directly(self, clients: Clients, checksum: str) -> ObjectInfo | None:
        if not is_plain(self._key):
            return None
        answer = clients.direct.send(
            "PUT", self._key, body=self._body,
            headers=_headers(self._metadata, self._content_type, self._condition, checksum),
        )  # fmt: skip
        if answer is None:
            self._body.seek(0)
            return None
        return self._info(answer.headers.get("etag"), answer.headers.get("x-amz-version-id"))

    def _through_boto(self, clients: Clients, checksum: str) -> ObjectInfo:
        answer = clients.s3.put_object(
            **clients.request,
            **requests.headers(self._metadata, self._content_type),
            **requests.conditions(self._condition),
            ChecksumCRC32=checksum,
            Key=self._key,
            Body=self._body,
        )
        return self._info(answer.get("ETag"), answer.get("VersionId"))

    def _info(self, etag: str | None, version_id: str | None) -> ObjectInfo:
        return _info(
            self._key, len(self._body), etag, version_id, self._metadata, self._content_type
        )


# --- deletes --------------------------------------------------------------------


async def delete(store: S3Store, key: str) -> None:
    """As `Store.delete`."""

    def work(clients: Clients) -> None:
        if clients.direct.send("DELETE", key) is None:
            clients.s3.delete_object(**clients.request, Key=key)

    await store.retried("DELETE", key, work)


async def delete_many(store: S3Store, keys: Iterable[str]) -> list[DeleteFailure]:
    """As `Store.delete_many`."""
    failures: list[DeleteFailure] = []
    batch: list[str] = []
    for key in keys:
        if _NOT_XML.search(key):
            try:
                await delete(store, key)
            except StoreError as error:
                failures.append(DeleteFailure(key, error))
            continue
        batch.append(key)
        if len(batch) == DELETES_AT_ONCE:
            failures += await _delete_batch(store, batch)
            batch = []
    return failures + (await _delete_batch(store, batch) if batch else [])


async def _delete_batch(store: S3Store, keys: list[str]) -> list[DeleteFailure]:
    left = keys
    failures: list[DeleteFailure] = []

    def work(clients: Clients) -> None:
        """Delete what is left, and leave what may be tried again."""
        nonlocal left
        objects = [{"Key": key} for key in left]
        answer = clients.s3.delete_objects(
            **clients.request, Delete={"Objects": objects, "Quiet": True}
        )
        again: list[str] = []
        last: Failure | None = None
        for refused in answer.get("Errors", []):
            failure = from_code(refused.get("Code", ""))
            if failure.is_retryable:
                again.append(refused["Key"])
                last = failure
            elif failure.status != 404:
                failures.append(DeleteFailure(refused["Key"], failure.kind(failure.sentence)))
        left = again
        if last is not None:
            raise AttemptError(last)

    try:
        await store.retried("DELETE", left[0], work)
    except StoreError as error:
        failures += [DeleteFailure(key, error) for key in left]
    return failures
