"""The record of multipart uploads that must be aborted, because S3 charges for their parts.

    STAGING/aborts       a line for each upload: its id, its key (posix/journal/line_log.py)

The multipart upload of a staged file is recorded with the file, until the file is removed or
sent in another way; then the upload is aborted. If the abort fails, or the process dies before it,
a later process of this mount or of the next mount aborts the upload. The uploads that the store
makes by itself, for copies of large objects, are recorded here from their begin to their end.
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
# The pause between attempts at an abort that S3 does not answer.
AGAIN_S = 60.0
# The tolerance for the begin of an upload, which S3 gives in whole seconds of its own clock.
CLOCKS_NS = 5_000_000_000
# After these errors an abort may succeed later, or with other credentials. Other errors may
# mean that the store does not list uploads and parts.
MAY_PASS = (CredentialsError, ThrottledError, UnreachableError)


class PendingAborts(UploadLog):
    """Records and aborts the multipart uploads of one mount. Belongs to the event loop."""

    def __init__(self, directory: Path, nursery: trio.Nursery, store: Store) -> None:
        self._log = LineLog(directory / NAME)
        self._nursery = nursery
        self._store = store
        # Keys by upload id.
        self._on_record: dict[str, str] = {}

    @property
    def pending(self) -> list[str]:
        """The keys of the multipart uploads on record: to be aborted, or of copies that go on."""
        return list(self._on_record.values())

    def begun(self, key: str, upload_id: str) -> None:
        """Record an upload that the store has begun, so that the next process can abort it."""
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
        """Record an upload, and start a task that aborts it after `delay_s` (None: AGAIN_S)."""
        self.begun(key, upload_id)
        wait_s = AGAIN_S if delay_s is None else delay_s
        self._nursery.start_soon(self._go_on, key, upload_id, wait_s)

    def adopt(self, key: str, upload_id: str, *, is_on_record: bool) -> None:
        """Record an earlier process's upload unless `is_on_record`; start a task that aborts it."""
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
        """Start to abort the uploads in an earlier process's record of a file that is not sent."""
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
        """Abort `upload` and uploads of `key` begun since `begun_ns` (None: none); log errors."""
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
        """Abort the uploads of `key` begun since `begun_ns`, with lost ids; raise only MAY_PASS."""
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
    """Return text that names `permission` as missing if S3 denied access; else return ""."""
    return f", for want of {permission}" if isinstance(error, AccessDeniedError) else ""


def load(directory: Path) -> list[tuple[str, str]]:
    """Read the uploads recorded in a staging directory: (key, id). Blocks."""
    loaded = load_lines(directory / NAME).items()
    return [(str(fields[0]), upload_id) for upload_id, fields in loaded]
