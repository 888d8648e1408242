"""Uploads in parts that are to be aborted, on record until they are: their parts are paid for.

    STAGING/aborts       one line for each: its id, its key (posix/journal/line_log.py)

The upload of a staged file is on record with the file, until that goes or is sent in
another way. If S3 does not abort it then, or a process ends before that, the next
one does, of this mount or of the next. So it is with the uploads that the store makes by
itself, for the copies of large objects: they are on record from their begin to their end.
"""

from __future__ import annotations

import logging
from pathlib import Path

import trio

from fusefs.posix.journal.line_log import LineLog, line, load_lines
from fusefs.store.contract import Store
from fusefs.store.errors import CredentialsError, StoreError, ThrottledError, UnreachableError
from fusefs.store.interface import UploadLog

logger = logging.getLogger("fusefs.uploads")

NAME = "aborts"
# How often an upload is aborted again for which S3 had no answer.
AGAIN_S = 60.0
# With other credentials, or later, it may be done.
MAY_PASS = (CredentialsError, ThrottledError, UnreachableError)


class PendingAborts(UploadLog):
    """The uploads of one mount that are to be aborted. Belongs to the event loop.

    They are on record in `directory`, and `store` aborts them, in tasks of `nursery`.
    """

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
        self._nursery.start_soon(
            self._go_on, key, upload_id, AGAIN_S if delay_s is None else delay_s
        )

    def adopt(self, key: str, upload_id: str, *, is_on_record: bool) -> None:
        """Take up what an earlier process was to abort, or has left.

        Raises:
            OSError: the disk does not take the record.
        """
        if upload_id in self._on_record:
            return
        if is_on_record:
            self._on_record[upload_id] = key
        else:
            self._put(key, upload_id)
        self._nursery.start_soon(self._go_on, key, upload_id, 0.0)

    def close(self) -> None:
        self._log.close(remove=not self._on_record)

    def _put(self, key: str, upload_id: str) -> None:
        if upload_id not in self._on_record:
            self._log.append(line([upload_id, key]))
            self._on_record[upload_id] = key

    async def _go_on(self, key: str, upload_id: str, delay_s: float) -> None:
        is_over = False
        while not is_over:
            await trio.sleep(delay_s)
            is_over = await self._abort(key, upload_id)
            delay_s = AGAIN_S
        self.ended(upload_id)

    async def _abort(self, key: str, upload_id: str) -> bool:
        """Abort an upload; True if that is over, well or badly."""
        try:
            await self._store.abort_upload(key, upload_id)
        except MAY_PASS:
            return False
        except StoreError as error:
            logger.warning("%s: its upload stays in the bucket: %s", key, error)
        return True


def load(directory: Path) -> list[tuple[str, str]]:
    """The uploads on record in a staging directory: keys and ids. Blocks."""
    loaded = load_lines(directory / NAME).items()
    return [(str(fields[0]), upload_id) for upload_id, fields in loaded]
