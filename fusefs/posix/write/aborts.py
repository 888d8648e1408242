"""Uploads in parts that are to be aborted, on record until they are: their parts are paid for.

    STAGING/aborts       one line for each: its id, its key (posix/journal/line_log.py)

The upload of a staged file is on record with the file, until that goes or is sent in
another way. If S3 does not abort it then, or a process ends before that, the next
one does, of this mount or of the next. So it is with the uploads that the store makes by
itself, for the copies of large objects: they are on record from their begin to their end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio

from fusefs.posix.journal.line_log import LineLog, line, load_lines
from fusefs.store.contract import Store
from fusefs.store.errors import (
    AccessDeniedError,
    CredentialsError,
    StoreError,
    ThrottledError,
    UnreachableError,
)
from fusefs.store.interface import UploadLog, UploadState

logger = logging.getLogger("fusefs.uploads")

NAME = "aborts"
# How often an upload is aborted again for which S3 had no answer.
AGAIN_S = 60.0
# S3 tells when an upload was begun in whole seconds, and by its own clock.
CLOCKS_NS = 5_000_000_000
# With other credentials, or later, it may be done. Not every store lists uploads and parts.
MAY_PASS = (CredentialsError, ThrottledError, UnreachableError)


class PendingAborts(UploadLog):
    """The uploads of one mount that are to be aborted. Belongs to the event loop."""

    def __init__(self, directory: Path, nursery: trio.Nursery, store: Store) -> None:
        self._log = LineLog(directory / NAME)
        self._nursery = nursery
        self._store = store
        # By their ids.
        self._on_record: dict[str, str] = {}

    @property
    def pending(self) -> list[str]:
        """The keys of those that are on record."""
        return list(self._on_record.values())

    def begun(self, key: str, upload_id: str) -> None:
        """The store has begun an upload, which the next process is to abort."""
        try:
            self._put(key, upload_id)
        except OSError as error:
            logger.info("%s: its upload is not on record: %s", key, error.strerror)

    def ended(self, upload_id: str) -> None:
        if self._on_record.pop(upload_id, None) is None:
            return
        if self._on_record or not self._log.write_anew([]):
            self._log.done([upload_id])
        if self._log.is_large:
            self._log.write_anew(line([id, key]) for id, key in self._on_record.items())

    def add(self, key: str, upload_id: str, *, delay_s: float | None = None) -> None:
        """Have an upload aborted, after a while, and as often as that takes."""
        self.begun(key, upload_id)
        wait_s = AGAIN_S if delay_s is None else delay_s
        self._nursery.start_soon(self._go_on, key, upload_id, wait_s)

    def adopt(self, key: str, upload_id: str, *, is_on_record: bool) -> None:
        """Take up what an earlier process was to abort, or has left."""
        if upload_id in self._on_record:
            return
        if is_on_record:
            self._on_record[upload_id] = key
        else:
            self._put(key, upload_id)
        self._nursery.start_soon(self._go_on, key, upload_id, 0.0)

    def adopt_of_file(
        self, key: str, upload: Mapping[str, Any] | None, begun_ns: int | None
    ) -> None:
        """Abort what an earlier process has left of a file that is not to be uploaded."""
        if upload is not None:
            state = UploadState.from_plain(upload)
            self.add(state.key, state.upload_id, delay_s=0.0)
        if begun_ns is not None:
            self._nursery.start_soon(self.abort, key, None, begun_ns)

    def close(self) -> None:
        self._log.close(remove=not self._on_record)

    def _put(self, key: str, upload_id: str) -> None:
        if upload_id not in self._on_record:
            self._log.append(line([upload_id, key]))
            self._on_record[upload_id] = key

    async def _go_on(self, key: str, upload_id: str, delay_s: float) -> None:
        while True:
            await trio.sleep(delay_s)
            delay_s = AGAIN_S
            try:
                await self._store.abort_upload(key, upload_id)
                break
            except MAY_PASS:
                continue
            except StoreError as error:
                logger.warning("%s: its upload stays in the bucket: %s", key, error)
                break
        self.ended(upload_id)

    async def abort(self, key: str, upload: UploadState | None, begun_ns: int | None) -> None:
        """Abort the upload of a file, and what an earlier process may have begun at `begun_ns`."""
        try:
            if begun_ns is not None:
                await self._abort_lost(key, begun_ns)
            if upload is not None:
                await self._store.abort_upload(upload.key, upload.upload_id)
        except StoreError as error:
            logger.warning("%s: its upload could not be aborted: %s", key, error)
            if upload is not None and isinstance(error, MAY_PASS):
                self.add(upload.key, upload.upload_id)

    async def try_abort_lost(self, key: str, begun_ns: int) -> None:
        """Abort what was begun without an id; only failures that may pass hold up the file."""
        try:
            await self._abort_lost(key, begun_ns)
        except MAY_PASS:
            raise
        except StoreError as error:
            why = want_of("s3:ListBucketMultipartUploads", error)
            logger.warning("%s: an upload of it may stay in the bucket%s: %s", key, why, error)

    async def _abort_lost(self, key: str, begun_ns: int) -> None:
        for lost in await self._store.list_uploads(key):
            if lost.key == key and lost.begun_ns >= begun_ns - CLOCKS_NS:
                await self._store.abort_upload(lost.key, lost.upload_id)


def want_of(permission: str, error: StoreError) -> str:
    """The permission or quota that a refused request lacks, for a message."""
    return f", for want of {permission}" if isinstance(error, AccessDeniedError) else ""


def load(directory: Path) -> list[tuple[str, str]]:
    """The uploads on record in a staging directory: keys and ids. Blocks."""
    loaded = load_lines(directory / NAME).items()
    return [(str(fields[0]), upload_id) for upload_id, fields in loaded]
