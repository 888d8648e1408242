"""The changes that the bucket lacks: their states, retries, and the upload at a mount's end."""

from __future__ import annotations

import logging
from typing import Any

import trio

from fusefs.posix.metadata.deferred_attributes import DeferredChange
from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.nodes.names import is_at_or_below
from fusefs.posix.tasks import for_each
from fusefs.posix.write.flush import Flusher, pause_s
from fusefs.posix.write.removals import Removal
from fusefs.posix.write.rules import Writing
from fusefs.posix.write.uploader import UploadAttempt
from fusefs.store.errors import CredentialsError, StoreError
from fusefs.telemetry.activity import ACTIVITY

logger = logging.getLogger("fusefs.writing")

# The pause between attempts at an upload that fails.
RETRY_S = 5.0
# If a mount's end takes longer, the log says what it waits for.
SLOW_S = 3.0
# The time limit of one `give_up` call.
GIVE_UP_S = 2.0
# Two states of a file: its first upload is under way; a program still has the file open.
UPLOADING = "uploading"
OPEN = "open"


class Backlog:
    """The staged files, attributes and removals that the bucket lacks. For the event loop."""

    def __init__(self, writing: Writing, flusher: Flusher) -> None:
        self._staging = writing.staging
        self._nursery = writing.nursery
        # Uploads beyond those that have places; together they leave room for programs' uploads.
        self._at_once = max(1, writing.rules.uploads // 4)
        self._flusher = flusher
        self._uploads = flusher.uploads
        self._prefix_lock = flusher.prefix_lock
        self._deferred = flusher.deferred
        self._removals = flusher.removals

    def files(self, key: str) -> list[StagedFile]:
        """The staged files at or below a key ("": all) that are not in the bucket."""
        return [file for file in self._staging.pending if is_at_or_below(file.key, key)]

    def unsent(self, key: str) -> list[StagedFile | DeferredChange | Removal]:
        """The files, attribute changes and removals at or below a key that are not sent yet."""
        return [*self.files(key), *self._deferred.pending(key), *self._removals.pending(key)]

    def state(self, staged: StagedFile | DeferredChange | Removal) -> str:
        """The state of a change that the bucket lacks, as a text for users."""
        if isinstance(staged, DeferredChange | Removal):
            return UPLOADING if staged.error is None else "failed"
        if self._uploads.is_under_way(staged):
            if not self._prefix_lock.is_open_at(staged.key):
                return "waiting for a rename"
            if isinstance(staged.error, CredentialsError):
                return "waiting for credentials"
            # Commands wait for no retries: of many failed uploads one is always under way.
            return UPLOADING if staged.error is None else "uploading again"
        if staged.error is not None:
            return "failed"
        return OPEN if staged.inode.is_open else "waiting"

    def hurry(self, key: str) -> None:
        """Start to send changes at or below a key, also of open files, not of killed programs."""
        self._deferred.hurry(key)
        self._removals.hurry(key)
        files = [one for one in self.files(key) if not self._flusher.is_given_up(one)]
        attempts = [self._uploads.start(staged) for staged in files]
        for staged, attempt in zip(files, attempts, strict=True):
            staged.error = None
            attempt.hurry.set()
        self._nursery.start_soon(for_each, _go_first, attempts, self._at_once)

    async def give_up(self, key: str) -> dict[str, Any]:
        """Give up the unsent contents and attributes at or below a key, within GIVE_UP_S.

        The contents stay on the local disk, but no mount uploads them. In the result `files` counts
        the changes given up, `in_use` has the keys of open files, which are not given up, and
        `remaining` counts the changes for which there was no time.

        Raises:
            StoreError: nothing could be given up in this time.
        """
        waiting: list[StagedFile | DeferredChange]
        waiting = [*self.files(key), *self._deferred.pending(key)]
        in_use, count = list[str](), len(waiting)
        with trio.move_on_after(GIVE_UP_S) as scope:
            while waiting:
                unsent = waiting[-1]
                if isinstance(unsent, DeferredChange):
                    await self._deferred.give_up(unsent)
                elif not await self._uploads.give_up(unsent):
                    in_use.append(unsent.key)
                waiting.pop()
        files = count - len(in_use) - len(waiting)
        if scope.cancelled_caught and not files:
            raise StoreError(f"no answer within {GIVE_UP_S:.0f} s")
        return {"files": files, "in_use": in_use, "remaining": len(waiting)}

    async def drain(self, limit_s: float) -> None:
        """Try once to send all changes but those of open files, within `limit_s`; keep the others.

        Also releases unchanged files: after a mount's end the kernel sends no RELEASE for them.
        """
        for staged in self._staging:
            staged.note_stores()
        finished = [one for one in self._staging.pending if one.is_closed or not one.inode.is_open]
        for staged in finished:
            self._uploads.start(staged).hurry.set()
        self._removals.hurry("")  # uploads and attributes may take all of the time
        with trio.move_on_after(limit_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._say_if_slow, finished)
                for staged in finished:
                    await self._uploads.ended(staged)
                await self._deferred.drain()
                await self._removals.drain()
                nursery.cancel_scope.cancel()
        to_close = set(finished)
        for staged in self._staging:
            if not staged.is_dirty:
                self._staging.release(staged)
                continue
            if staged in to_close:
                self._staging.close(staged)
            logger.error("%s is not in the bucket; kept in %s", staged.key, staged.path)
        for entry in self._deferred.pending(""):
            logger.error("the attributes of %s are not in the bucket; kept on record", entry.key)
        for gone in self._removals.pending(""):
            logger.error("%s is not deleted in the bucket; that is kept on record", gone.key)
        for key in self._uploads.aborts.pending:
            logger.error("an upload of %s is not aborted in the bucket; kept on record", key)
        for log in (self._deferred, self._removals, self._uploads.aborts):
            log.close()
        self._staging.remove_if_empty()

    async def _say_if_slow(self, files: list[StagedFile]) -> None:
        await trio.sleep(SLOW_S)
        remaining = [file for file in files if file.is_dirty]
        size = sum(file.size() for file in remaining)
        logger.info("ending waits for uploads of %d files, %d bytes", len(remaining), size)

    async def run(self) -> None:
        """Retry failed uploads, and upload open files `pause_s` after a change, until cancelled."""
        is_under_way = self._uploads.is_under_way
        while True:
            if self._staging.pending:
                await trio.sleep(RETRY_S)
            else:
                await ACTIVITY.pause(RETRY_S)
            now = trio.current_time()
            for staged in [one for one in self._staging.pending if not is_under_way(one)]:
                if staged.inode.writing:
                    is_due = staged.is_content_dirty and now >= staged.since + pause_s(
                        staged.size()
                    )
                    if is_due and staged.writers:
                        self._uploads.start(staged, is_background=True)
                elif not self._flusher.is_given_up(staged) and now >= staged.since + staged.pause_s:
                    self._uploads.start(staged)


async def _go_first(attempt: UploadAttempt) -> None:
    """Let an upload that a command waits for overtake those that queue, and wait for its end."""
    attempt.queueing.cancel()
    await attempt.done.wait()
