"""The changes that the bucket lacks: described, hurried, tried again, sent at a mount's end."""

from __future__ import annotations

import logging
from typing import Any

import trio

from fusefs.posix.metadata.deferred_attributes import DeferredChange
from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.nodes.names import is_at_or_below
from fusefs.posix.write.flush import Flusher
from fusefs.posix.write.removals import Removal
from fusefs.posix.write.staging import Staging
from fusefs.posix.write.upload_times import pause_s
from fusefs.store.errors import CredentialsError
from fusefs.telemetry.activity import ACTIVITY

logger = logging.getLogger("fusefs.writing")

# How often uploads that failed are tried again.
RETRY_S = 5.0
# An end that takes longer says what it waits for.
SLOW_S = 3.0
# How long one request of a command gives files up.
GIVE_UP_S = 2.0
# The states of a file that is on its way, and of one that is not to be yet.
UPLOADING = "uploading"
OPEN = "open"


class Backlog:
    """The staged files, attributes and removals that are not in the bucket yet.

    Belongs to the event loop.
    """

    def __init__(self, staging: Staging, flusher: Flusher) -> None:
        self._staging = staging
        self._flusher = flusher
        self._uploads = flusher.uploads
        self._prefix_lock = flusher.prefix_lock
        self._deferred = flusher.deferred
        self._removals = flusher.removals

    def files(self, key: str) -> list[StagedFile]:
        """The staged files at or below a key ("": all) that are not in the bucket."""
        return [file for file in self._staging.pending if is_at_or_below(file.key, key)]

    def unsent(self, key: str) -> list[StagedFile | DeferredChange | Removal]:
        """As `files`, with the attributes that the bucket lacks, and what is to go from it."""
        return [*self.files(key), *self._deferred.pending(key), *self._removals.pending(key)]

    def state(self, staged: StagedFile | DeferredChange | Removal) -> str:
        """The state of a file that is not in the bucket, for people to read."""
        if isinstance(staged, DeferredChange | Removal):
            return UPLOADING if staged.error is None else "failed"
        if self._uploads.is_under_way(staged):
            if not self._prefix_lock.is_open_at(staged.key):
                return "waiting for a rename"
            is_refused = isinstance(staged.error, CredentialsError)
            return "waiting for credentials" if is_refused else UPLOADING
        if staged.error is not None:
            return "failed"
        return OPEN if staged.inode.is_open else "waiting"

    def hurry(self, key: str) -> None:
        """Have everything at or below a key uploaded now, also what is open."""
        self._deferred.hurry(key)
        self._removals.hurry(key)
        for staged in self.files(key):
            if self._flusher.is_given_up(staged):
                continue
            staged.error = None
            self._uploads.start(staged).hurry.set()

    async def give_up(self, key: str) -> dict[str, Any]:
        """Have what the bucket lacks at and below a key be as the bucket has it, for a while.

        What was written stays on the disk, where no mount takes it up. `files` counts those that
        were given up, `in_use` names those that programs have open, `remaining` counts others.
        """
        files, in_use = await self._deferred.give_up(key), []
        waiting = self.files(key)
        with trio.move_on_after(GIVE_UP_S):
            while waiting:
                staged = waiting[-1]
                if await self._uploads.give_up(staged):
                    files += 1
                else:
                    in_use.append(staged.key)
                waiting.pop()
        return {"files": files, "in_use": in_use, "remaining": len(waiting)}

    async def drain(self, limit_s: float) -> None:
        """Upload once what is pending and whole, if that takes no longer; the rest is kept."""
        finished = [
            file for file in self._staging.pending if file.is_closed or not file.inode.is_open
        ]
        for staged in finished:
            self._uploads.start(staged).hurry.set()
        with trio.move_on_after(limit_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._say_if_slow, finished)
                for staged in finished:
                    await self._uploads.ended(staged)
                await self._deferred.drain()
                await self._removals.drain()
                nursery.cancel_scope.cancel()
        for staged in self._staging.pending:
            if staged in finished:
                staged.close()
                self._staging.try_record(staged)
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
        """Upload again what could not be, and now and then what stays open, until cancelled."""
        while True:
            if self._staging.pending:
                await trio.sleep(RETRY_S)
            else:
                await ACTIVITY.pause(RETRY_S)
            now = trio.current_time()
            for staged in self._staging.pending:
                if self._flusher.may_be_written(staged.inode):
                    is_due = staged.is_content_dirty and now >= staged.since + pause_s(
                        staged.size()
                    )
                    if is_due and staged.writers:
                        self._uploads.start(staged, is_background=True)
                elif not self._flusher.is_given_up(staged) and now >= staged.since + staged.pause_s:
                    self._uploads.start(staged)
