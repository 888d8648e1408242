"""Deletes, of one object or of a thousand with a request, over known ETags where that is possible.

A DELETE that is repeated because its answer was lost, or that the server
executes late, may find an object that somebody has made since. With an ETag
(`If-Match`, or in the document of DeleteObjects) it deletes only the object
that was meant. Where the server says that another one is there (412), a HEAD
tells which.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fusefs.store.errors import (
    ConflictError,
    Failure,
    NotFoundError,
    StoreError,
    UnsupportedError,
    from_code,
)
from fusefs.store.interface import DeleteFailure, IfMatch
from fusefs.store.s3 import head
from fusefs.store.s3.conditions import ADOPTIONS
from fusefs.store.s3.get import AttemptError, is_plain

if TYPE_CHECKING:
    from fusefs.store.s3.clients import Clients
    from fusefs.store.s3.store import S3Store

logger = logging.getLogger("fusefs.store")

DELETES_AT_ONCE = 1000
# Characters that a DeleteObjects request, XML 1.0, has no way to write.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


class _Delete:
    """One DELETE over several attempts. `may_be_done`: one of them may have deleted it."""

    def __init__(self, key: str, etag: str | None) -> None:
        self._key = key
        self._condition = IfMatch(etag) if etag else None
        self.may_be_done = False

    async def send(self, store: S3Store) -> None:
        """Send it, from the event loop where that is possible.

        Raises:
            StoreError: S3 did not delete it.
        """
        if is_plain(self._key):
            answer = await store.at_once(
                "DELETE", self._key, headers=head.condition_headers(self._condition),
                condition=self._condition, failed=self._note_failed,
            )  # fmt: skip
            if answer is not None:
                return
        await store.retried("DELETE", self._key, self.run)

    def _note_failed(self) -> None:
        self.may_be_done = True

    def run(self, clients: Clients) -> None:
        """Send it. Blocks.

        Raises:
            AttemptError: S3 did not delete it.
        """
        headers = head.condition_headers(self._condition)
        try:
            if clients.direct.send("DELETE", self._key, headers=headers) is None:
                conditions = head.conditions(self._condition)
                clients.s3.delete_object(**clients.request, **conditions, Key=self._key)
        except Exception as error:
            failure = head.judged(error, self._condition)
            self.may_be_done |= failure.is_retryable
            raise AttemptError(failure) from error


async def delete(store: S3Store, key: str, etag: str | None, *, adopts: bool) -> None:
    """As `Store.delete`."""
    may_be_done = False
    name = "marker_delete_if_match" if key.endswith("/") else "delete_if_match"
    for _ in range(ADOPTIONS):
        sent = etag if store.fence.honours(name) else None
        one = _Delete(key, sent)
        try:
            return await one.send(store)
        except UnsupportedError:
            if sent is None:
                raise
            store.fence.note_unsupported(name)
            continue
        except (ConflictError, NotFoundError):
            if sent is None:
                raise
        may_be_done |= one.may_be_done
        there = await store.fence.look(key)
        if there is None:
            return None
        if there.etag != sent and (may_be_done or not adopts):
            logger.debug("%s: another object is there by now, and stays", key)
            return None
        # A server that refuses the ETag that it tells gets the request without one.
        etag = None if there.etag == sent else there.etag
    return await _Delete(key, None).send(store)


async def delete_many(
    store: S3Store, keys: Iterable[str], etags: Mapping[str, str]
) -> list[DeleteFailure]:
    """As `Store.delete_many`."""
    failures: list[DeleteFailure] = []
    batch: list[str] = []
    for key in keys:
        if _NOT_XML.search(key):
            failures += await _delete_singly(store, [key], etags)
            continue
        batch.append(key)
        if len(batch) == DELETES_AT_ONCE:
            failures += await _delete_batch(store, batch, etags)
            batch = []
    return failures + (await _delete_batch(store, batch, etags) if batch else [])


async def _delete_singly(
    store: S3Store, keys: list[str], etags: Mapping[str, str]
) -> list[DeleteFailure]:
    failures = []
    for key in keys:
        try:
            await delete(store, key, etags.get(key), adopts=False)
        except StoreError as error:
            failures.append(DeleteFailure(key, error))
    return failures


async def _delete_batch(
    store: S3Store, keys: list[str], etags: Mapping[str, str]
) -> list[DeleteFailure]:
    batch = _Batch(keys, etags if store.fence.honours("delete_many_etags") else {})
    try:
        await store.retried("DELETE", keys[0], batch.run)
    except UnsupportedError:
        if not etags or not store.fence.honours("delete_many_etags"):
            raise
        store.fence.note_unsupported("delete_many_etags")
        return await _delete_batch(store, keys, etags)
    except StoreError as error:
        batch.failures += [DeleteFailure(key, error) for key in batch.left]
    return batch.failures + await _settle_refused(store, batch.refused, etags)


async def _settle_refused(
    store: S3Store, keys: list[str], etags: Mapping[str, str]
) -> list[DeleteFailure]:
    """Delete what has the expected ETag after all; anything else stays."""
    wanted: list[str] = []
    failures: list[DeleteFailure] = []
    for key in keys:
        try:
            there = await store.fence.look(key)
        except StoreError as error:
            failures.append(DeleteFailure(key, error))
            continue
        if there is not None and there.etag == etags.get(key):
            wanted.append(key)
    return failures + await _delete_singly(store, wanted, etags)


class _Batch:
    """The deletes of one request, over several attempts.

    `left` are those to be deleted still; `refused` those under whose keys the
    server has found other ETags than expected, which a request for each settles.
    """

    def __init__(self, keys: list[str], etags: Mapping[str, str]) -> None:
        self.left = keys
        self.refused: list[str] = []
        self.failures: list[DeleteFailure] = []
        self._etags = etags

    def run(self, clients: Clients) -> None:
        """Delete what is left, and leave what may be tried again. Blocks.

        Raises:
            AttemptError: something is left.
        """
        objects = [
            {"Key": key, "ETag": self._etags[key]} if key in self._etags else {"Key": key}
            for key in self.left
        ]
        answer = clients.s3.delete_objects(
            **clients.request, Delete={"Objects": objects, "Quiet": True}
        )
        again: list[str] = []
        last: Failure | None = None
        for told in answer.get("Errors", []):
            key, failure = told["Key"], from_code(told.get("Code", ""))
            if failure.is_retryable:
                again.append(key)
                last = failure
            elif failure.status == 412:
                self.refused.append(key)
            elif failure.status != 404:
                self.failures.append(DeleteFailure(key, failure.kind(failure.sentence)))
        self.left = again
        if last is not None:
            raise AttemptError(last)
