"""Deletes of one object, or of a thousand in one request, with known ETags where possible.

A DELETE that is repeated because its answer was lost, or that the server executes late, may find an
object that another client has made since. With an ETag (`If-Match`, or in the document of
DeleteObjects) the request deletes only the intended object. After a 412, a HEAD shows the object
that is there.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial

from fusefs.store.engine.engine import Completion
from fusefs.store.errors import (
    ConflictError,
    NotFoundError,
    StoreError,
    UnsupportedError,
    from_code,
)
from fusefs.store.interface import DeleteFailure, IfMatch, Strict
from fusefs.store.s3 import documents
from fusefs.store.s3.address import Call
from fusefs.store.s3.body import encoded
from fusefs.store.s3.conditions import ADOPTIONS, Fence, condition_headers

logger = logging.getLogger("fusefs.store")

DELETES_AT_ONCE = 1000
# Characters that XML 1.0, and so a DeleteObjects request, cannot express.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


async def delete(fence: Fence, key: str, etag: str | None = None, *, adopts: bool = False) -> None:
    """Delete an object; with `etag`, another version stays unless `adopts` (`Store.delete`)."""

    async def send(condition: Strict) -> None:
        call = Call("DELETE", "DELETE", key, headers=condition_headers(condition))
        await fence.requester.send(call, lambda _: None, condition=condition)

    may_be_done = False
    for _ in range(ADOPTIONS):
        condition = IfMatch(etag) if etag else None
        try:
            return await fence.send("DELETE", condition, send)
        except (NotFoundError, ConflictError) as error:
            if fence.sent("DELETE", condition) is None:
                if isinstance(error, NotFoundError):
                    return None  # Google's store answers 404 if there is no object
                raise
            may_be_done |= error.may_be_done
        there = await fence.find(key)
        if there is None:
            return None
        if adopts and there.size and key.endswith("/"):
            raise ConflictError(f"{key} has content by now, which stays")
        if IfMatch(there.etag) != condition and (may_be_done or not adopts):
            logger.debug("%s: another object is there by now, and stays", key)
            return None
        # A server that refuses the object's own ETag gets the request without a condition.
        etag = None if IfMatch(there.etag) == condition else there.etag
    with suppress(NotFoundError):
        await send(None)
    return None


async def delete_many(
    fence: Fence, keys: Iterable[str], etags: Mapping[str, str] | None = None
) -> list[DeleteFailure]:
    """Delete objects, a thousand a time, those in `etags` only with that ETag; return failures."""
    etags = etags or {}
    failures: list[DeleteFailure] = []
    batch: list[str] = []
    for key in keys:
        if _NOT_XML.search(key):
            failures += await _delete_singly(fence, key, etags)
            continue
        batch.append(key)
    condition = IfMatch("") if etags else None
    for first in range(0, len(batch), DELETES_AT_ONCE):
        send = partial(_send_batch, fence, batch[first : first + DELETES_AT_ONCE], etags)
        failures += await fence.send("DeleteObjects", condition, send)
    return failures


async def _delete_singly(fence: Fence, key: str, etags: Mapping[str, str]) -> list[DeleteFailure]:
    try:
        await delete(fence, key, etags.get(key), adopts=False)
    except StoreError as error:
        return [DeleteFailure(key, error)]
    return []


async def _send_batch(
    fence: Fence, keys: list[str], etags: Mapping[str, str], condition: Strict
) -> list[DeleteFailure]:
    # Keys still to be deleted, and keys whose object has another ETag than expected.
    remaining, refused = keys, list[str]()
    failures: list[DeleteFailure] = []

    async def call() -> Call:
        document = documents.deletion(remaining, etags if condition else {})
        # S3 demanded an MD5 for many years, and many stores still do.
        digest = hashlib.md5(document, usedforsecurity=False).digest()
        headers = {"content-type": "application/xml", "content-md5": encoded(digest)}
        return Call("DELETE", "POST", query={"delete": ""}, headers=headers, document=document)

    def accept(answer: Completion) -> None:
        nonlocal remaining
        undeleted, last = documents.undeleted(answer), ""
        remaining = []
        for key, code in undeleted:
            failure = from_code(code)
            if failure.is_retryable:
                remaining.append(key)
                last = code
            elif failure.status == 412:
                refused.append(key)
            elif failure.status != 404:
                failures.append(DeleteFailure(key, failure))
        if remaining:
            raise from_code(last)

    try:
        await fence.requester.send(call, accept)
    except UnsupportedError:
        raise
    except StoreError as error:
        failures += [DeleteFailure(key, error) for key in remaining]
    for key in refused:
        # An object with the expected ETag is deleted after all; any other is left.
        try:
            there = await fence.find(key)
        except StoreError as error:
            failures.append(DeleteFailure(key, error))
            continue
        if there is not None and there.etag == etags.get(key):
            failures += await _delete_singly(fence, key, etags)
    return failures
