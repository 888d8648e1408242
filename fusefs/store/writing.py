"""Single writes: PUT of a file that is one part, and deletes.

A small file is read whole and sent by obstore, with the SHA256 that it needs
for its signature anyway; a larger one, or a key that obstore can't express,
is sent by boto3 with a CRC32. S3 compares either with what has arrived.

A write whose answer was lost may have taken effect. Repeating it does no harm,
except that a condition need not hold any more: then the checksum and the
metadata of the object tell whether it is ours.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

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

# What obstore sends, and so holds in memory; larger files are read as they are sent.
SMALL = 1 << 20
DELETES_AT_ONCE = 1000
# What obstore takes for a header of its own, and not for metadata.
_HEADERS = {
    "content-type", "content-disposition", "content-encoding", "content-language",
    "cache-control", "storage-class",
}  # fmt: skip
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
    one = _Put(key, Body(fd, 0, size), metadata, content_type, condition)
    info = await store.retried("PUT", key, one.run, requests.writing, transfer=one)
    store.note_sent(size)
    return info


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
        # The metadata that obstore would take for headers, and odd keys, are boto3's.
        is_plain_put = is_plain(key) and not _HEADERS & metadata.keys()
        self._is_small = len(body) <= SMALL and is_plain_put
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
        send = self._through_obstore if self._is_small else self._through_boto
        try:
            return send(clients)
        except Exception as error:
            failure = requests.judged(error, self._condition)
            if self._may_be_done and issubclass(failure.kind, ConflictError):
                info = requests.find(
                    clients, self._key, len(self._body), self._metadata, self._checksum()
                )
                if info is not None:
                    return info
            self._may_be_done |= failure.is_retryable
            raise AttemptError(failure) from error

    def _through_obstore(self, clients: Clients) -> ObjectInfo:
        import obstore

        data = self._body.whole()
        attributes = dict(self._metadata)
        if self._content_type is not None:
            attributes["Content-Type"] = self._content_type
        mode: Any = "create" if self._condition == IF_ABSENT else "overwrite"
        if isinstance(self._condition, IfMatch):
            mode = {"e_tag": self._condition.etag}
        answer = obstore.put(
            clients.objects, self._key, data, attributes=attributes, mode=mode, use_multipart=False
        )
        return self._info(answer["e_tag"], answer["version"])

    def _through_boto(self, clients: Clients) -> ObjectInfo:
        answer = clients.s3.put_object(
            **clients.request,
            **requests.headers(self._metadata, self._content_type),
            **requests.conditions(self._condition),
            **self._checksum(),
            Key=self._key,
            Body=self._body,
        )
        return self._info(answer.get("ETag"), answer.get("VersionId"))

    def _checksum(self) -> dict[str, str]:
        """What S3 compares, as boto3 and HEAD put it."""
        if self._is_small:
            return {"ChecksumSHA256": encoded(hashlib.sha256(self._body.whole()).digest())}
        return {"ChecksumCRC32": self._body.checksum()}

    def _info(self, etag: str | None, version_id: str | None) -> ObjectInfo:
        if not etag:
            raise requests.no_etag()
        return ObjectInfo(
            self._key,
            len(self._body),
            listing.quoted(etag),
            requests.now_ns(),
            content_type=self._content_type,
            version_id=version_id,
            metadata=self._metadata,
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
