"""Staged files on their way into the bucket: when, and in whose task.

An upload is a task of its own: a request that waits for it may be cancelled (of
a program that is killed in its close), and it goes on. It holds the file's lock, so
that writes wait and no object is a mix of two contents. What is sent, and how,
is in upload_steps.py.

A file that grows from its start on is sent while it is being written: each
part as soon as it is full, so that close has to wait for the last ones only.

What failed stays staged and dirty, and the requests that wait fail. Rejected
credentials are no failure: the upload waits until they are renewed.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import trio

from fusefs.posix.nodes.edit_base import IN_PARTS
from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.nodes.prefix_lock import PrefixLock
from fusefs.posix.tasks import judged
from fusefs.posix.types import find
from fusefs.posix.write import staged_sums
from fusefs.posix.write.exclusive import is_undecided
from fusefs.posix.write.rules import Writing
from fusefs.posix.write.sparse_edit import BaseLostError, SparseEditor
from fusefs.posix.write.upload_steps import CREATED_BY, UploadSteps, content_type
from fusefs.posix.write.upload_times import RecentCloses
from fusefs.store.contract import Store
from fusefs.store.errors import (
    ConflictError,
    CredentialsError,
    StaleVersionError,
    StoreError,
    UnsupportedError,
)
from fusefs.store.interface import IF_ABSENT, ObjectInfo, Write
from fusefs.store.s3.multipart import Upload
from fusefs.telemetry.stalls import WaitCause, Work, stage, waiting_for

logger = logging.getLogger("fusefs.uploads")

# A file is sent while it is written once it has this much, which is two parts.
AHEAD = 16 << 20
# How often it is tried again with credentials that were rejected.
CREDENTIALS_S = 5.0
# An upload that waits until a file is left alone waits for so many times as long at most.
LONGEST_DELAYS = 5
# How often one upload meets another object of somebody else before it fails, and is tried again
# later.
MOST_CONFLICTS = 20
# A file that is open is uploaded for so long at a time: what cannot be written meanwhile waits.
BACKGROUND_S = 20.0


@dataclass(slots=True, eq=False)
class UploadAttempt:
    """One upload of one file. `scope` may be cancelled while `is_cancellable`.

    One in the background, of a file that is open, is given up for now where it takes long:
    writes wait for it.
    """

    work: Work
    is_background: bool = False
    done: trio.Event = field(default_factory=trio.Event)
    hurry: trio.Event = field(default_factory=trio.Event)
    error: Exception | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_cancellable: bool = True

    def commit(self) -> None:
        """Note that what is done from now on may come to pass even if it is cancelled."""
        self.is_cancellable = False
        self.scope.deadline = math.inf


@dataclass(slots=True, eq=False)
class StreamingUpload:
    """The upload of a file while a program still writes it.

    Its work is that of the file's upload: who waits for the upload waits for these parts too.
    """

    work: Work
    done: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_last: bool = False


class Uploader:
    """The uploads of one mount. Belongs to the event loop.

    `landed` is called with what the bucket has of a file, `kept_apart` with what it was
    kept as because somebody else's object (or nothing) is under its key.
    `set_aside` is called with a file whose name is another object's: an edited one whose rest is
    lost, or one of which the bucket lacks attributes alone.
    Whoever waits for an upload that fails gets its StoreError or OSError; the file stays staged.
    """

    def __init__(
        self,
        store: Store,
        writing: Writing,
        editor: SparseEditor,
        prefix_lock: PrefixLock,
        landed: Callable[[StagedFile, ObjectInfo], None],
        kept_apart: Callable[[StagedFile, ObjectInfo, ObjectInfo | None], None],
        set_aside: Callable[[StagedFile, ObjectInfo | None], None],
    ) -> None:
        self._store = store
        staging, fails = writing.staging, writing.rules.fails_on_conflict
        self._nursery = nursery = writing.nursery
        self.aborts = writing.aborts
        self._steps = UploadSteps(store, staging, editor, self.aborts, fails_on_conflict=fails)
        self.own = self._steps.own
        self.put_new = self._steps.put_new
        self._staging = staging
        self._editor = editor
        self._prefix_lock = prefix_lock
        self._landed = landed
        self._kept_apart = kept_apart
        self._set_aside = set_aside
        self._unanswered = store.unanswered
        self._is_local = writing.rules.is_local
        self._attempts: dict[StagedFile, UploadAttempt] = {}
        self._aheads: dict[StagedFile, StreamingUpload] = {}
        self.failures = 0
        # Of files that are safe on the local disk, and uploaded later.
        self.closes = RecentCloses(nursery)

    # Asking for it

    async def wait(self, staged: StagedFile) -> None:
        """Have the content and the attributes of now in the bucket; cancelled, it goes on."""
        wanted = staged.changes
        while staged.is_dirty and (staged.uploaded < wanted or staged.is_meta_dirty):
            attempt = self._attempts.get(staged) or self.start(staged)
            attempt.hurry.set()
            with attempt.work.awaited():
                await attempt.done.wait()
            if attempt.error is not None:
                raise attempt.error

    def start(
        self, staged: StagedFile, delay_s: float = 0.0, *, is_background: bool = False
    ) -> UploadAttempt:
        """Have a file uploaded, after a while; whoever waits for it cuts that short."""
        attempt = self._attempts.get(staged)
        if attempt is None:
            ahead = self._aheads.get(staged)
            work = ahead.work if ahead is not None else Work()
            attempt = UploadAttempt(work, is_background)
            self._attempts[staged] = attempt
            self._nursery.start_soon(self._run, staged, attempt, delay_s)
        return attempt

    async def ended(self, staged: StagedFile) -> None:
        """Wait until a file's upload, if there is one, has come to its end, good or bad."""
        attempt = self._attempts.get(staged)
        if attempt is not None:
            with waiting_for(attempt.work):
                await attempt.done.wait()

    @asynccontextmanager
    async def locked(self, staged: StagedFile) -> AsyncIterator[None]:
        """Hold a file's lock; requests that wait for its upload to end wait for what that does."""
        attempt = self._attempts.get(staged)
        if attempt is not None and staged.lock.locked():
            with waiting_for(attempt.work):
                await staged.lock.acquire()
        else:
            await staged.lock.acquire()
        try:
            yield
        finally:
            staged.lock.release()

    def is_under_way(self, staged: StagedFile) -> bool:
        return staged in self._attempts

    @asynccontextmanager
    async def held(self, staged: StagedFile) -> AsyncIterator[None]:
        """Keep a file from being written or uploaded, to give it another key or none.

        An upload under way is cancelled where that leaves nothing in the
        bucket, else waited for. Who waits for it will have it under the new key.
        """
        attempt = self._attempts.get(staged)
        if attempt is not None and attempt.is_cancellable:
            attempt.scope.cancel()
        if (ahead := self._aheads.get(staged)) is not None:
            ahead.scope.cancel()
            await ahead.done.wait()
        async with self.locked(staged):
            key = staged.key
            yield
            if staged.key != key or staged.is_unlinked:
                await self._steps.abandon(staged)

    async def give_up(self, staged: StagedFile) -> bool:
        """Have a file be what the bucket has, its content set aside; False if it is open."""
        async with self.held(staged):
            if staged.inode.is_open:
                return False
            if staged.inode.staged is staged and staged.is_dirty:
                await self._leave_to_bucket(staged)
        return True

    async def _leave_to_bucket(self, staged: StagedFile) -> None:
        """Set a locked file aside: its name is what the bucket has."""
        await self._steps.abandon(staged)
        theirs = await find(self._store, staged.key)
        staged.is_meta_dirty = False
        self._set_aside(staged, theirs)

    async def _run(self, staged: StagedFile, attempt: UploadAttempt, delay_s: float) -> None:
        try:
            if delay_s:
                await self._until_left_alone(staged, attempt, delay_s)
            while staged.is_dirty:
                if attempt.is_background:
                    attempt.scope.deadline = trio.current_time() + BACKGROUND_S
                with attempt.scope, attempt.work.doing():
                    try:
                        async with self._locked_to_send(staged):
                            await self._upload(staged, attempt)
                        break
                    except CredentialsError as error:
                        staged.error = error
                        logger.warning("%s waits for other credentials: %s", staged.key, error)
                    # Without the lock: whoever writes to the file need not wait as well.
                    with stage(WaitCause.CREDENTIALS):
                        await trio.sleep(CREDENTIALS_S)
                if attempt.scope.deadline <= trio.current_time() and not attempt.hurry.is_set():
                    staged.since = trio.current_time()
                    return
                attempt.scope = trio.CancelScope()
            staged.error = None
        except Exception as error:
            staged.error = attempt.error = judged(error)
            self.failures += 1
            logger.warning("%s is not in the bucket yet: %s", staged.key, error)
            try:
                # It stays on the local disk for a while.
                if staged.is_content_dirty and staged.inode.staged is staged:
                    await staged_sums.note(staged)
            except OSError as unread:
                logger.warning("%s has no checksum: %s", staged.key, unread)
        finally:
            del self._attempts[staged]
            attempt.done.set()

    async def _until_left_alone(
        self, staged: StagedFile, attempt: UploadAttempt, delay_s: float
    ) -> None:
        """Wait until a file's name and attributes are left alone, and no program closes many files.

        Uploads would take the processor from it. Whoever waits for the upload cuts that short.
        """
        begun = trio.current_time()
        while not attempt.hurry.is_set():
            last = begun + LONGEST_DELAYS * delay_s
            due = min(max(begun, staged.described_at) + delay_s, last)
            if due > trio.current_time():
                with trio.move_on_at(due):
                    await attempt.hurry.wait()
                continue
            is_due = last <= trio.current_time() or self._staging.is_filling
            if is_due or not self.closes.is_busy:
                return
            await self.closes.wait_for_pause(attempt.hurry, last)

    @asynccontextmanager
    async def _locked_to_send(self, staged: StagedFile) -> AsyncIterator[None]:
        """Hold a file's lock while no rename of a directory has its key."""
        while True:
            await self._prefix_lock.until_open_at(lambda: staged.key)
            # A free lock is taken without giving way, which would be two turns of the loop.
            if staged.lock.locked():
                await staged.lock.acquire()
            else:
                staged.lock.acquire_nowait()
            if self._prefix_lock.is_open_at(staged.key):
                break
            staged.lock.release()
        try:
            yield
        finally:
            staged.lock.release()

    async def _upload(self, staged: StagedFile, attempt: UploadAttempt) -> None:
        """Upload a file that is locked, or set it aside if that can't be any more."""
        try:
            for is_last in (*(False,) * MOST_CONFLICTS, True):
                if not staged.is_dirty:
                    return  # it was removed while this waited for it
                try:
                    await self._send(staged, attempt)
                    return
                except UnsupportedError:
                    if is_last or not self._steps.lacks_conditions(staged):
                        raise
                except (ConflictError, StaleVersionError) as error:
                    is_described = not staged.is_content_dirty
                    if is_last or not (is_described or self._steps.is_careful(staged)):
                        raise
                    theirs = await find(self._store, staged.key)
                    if not await self._steps.can_go_on(staged, theirs):
                        await self._yield_to(staged, theirs, error)
                        return
                finally:
                    attempt.is_cancellable = True
        except BaseLostError as error:
            await self._leave_to_bucket(staged)
            raise OSError(errno.ESTALE, "the object was replaced while it was edited") from error

    async def _send(self, staged: StagedFile, attempt: UploadAttempt) -> None:
        ahead = self._aheads.get(staged)
        if ahead is not None:
            ahead.is_last = True  # what is on its way is taken over
            if staged.upload is None:
                await ahead.done.wait()  # it is just beginning
        if staged.is_content_dirty:
            await staged_sums.check(staged)
        described, stamp = staged.meta_changes, staged.stamp()
        info = await self._steps.send(staged, attempt.commit)
        base = staged.base
        if base is not None and base.file.is_complete:
            # So that the new version is as whole in the cache as the old one was. What can't
            # be brought is the new object's: the bucket has the edit in any case.
            with suppress(StoreError, OSError):
                await self._editor.fill(base, staged.fd, 0, base.size)
        self.note_uploaded(staged, info, described)
        if attempt.is_background:
            staged.is_rewrite = False  # the object that it was to replace is gone
        if staged.may_be_mapped and staged.stamp() not in (stamp, (stamp[0], info.mtime_ns)):
            staged.touch()  # a program has stored something meanwhile
        self._landed(staged, info)

    async def _yield_to(
        self, staged: StagedFile, theirs: ObjectInfo | None, error: Exception
    ) -> None:
        """Leave a name to somebody else's object (None: to nothing), and raise what that means."""
        await self._steps.abandon(staged)
        described = staged.meta_changes
        if theirs is not None and await self._steps.is_content_of(theirs, staged):
            # Uploaded by a process that died before it could say so.
            self.note_uploaded(staged, theirs, described)
            self._unanswered.confirm(theirs.key, theirs)
            self._landed(staged, theirs)
            return
        if not staged.is_content_dirty:
            staged.is_meta_dirty = False
            self._set_aside(staged, theirs)
            raise OSError(errno.ESTALE, "replaced: its attributes are given up") from error
        is_exclusive = staged.exclusive is not None
        info = await self._steps.store_beside(staged)
        self.note_uploaded(staged, info, described)
        self._kept_apart(staged, info, theirs)
        if is_exclusive:
            raise OSError(errno.EEXIST, "another node has made the file before") from error
        raise OSError(errno.ESTALE, "somebody else has replaced the object") from error

    def note_uploaded(self, staged: StagedFile, info: ObjectInfo, described: int) -> None:
        """The bucket has what was sent of a locked file: its changes up to `described`."""
        if staged.is_content_dirty and staged.meta.other:
            staged.meta = replace(staged.meta, other=())
        staged.is_meta_dirty = staged.meta_changes != described
        staged.mark_uploaded(info.size)
        if staged.may_be_mapped:
            staged.clean = staged.stamp()
        staged.etag = info.etag
        staged.exclusive = None
        staged.tokens.clear()
        if staged.base is not None:
            self._staging.rebase(staged.base, info.version)

    async def reserve(self, staged: StagedFile) -> None:
        """Show other nodes a file that is open and to be new; its close tells of failures."""
        try:
            async with self._locked_to_send(staged):
                if is_undecided(staged):
                    metadata = staged.described().as_metadata() | {
                        CREATED_BY: str(staged.exclusive)
                    }
                    write = Write(metadata, content_type(staged.key), IF_ABSENT)
                    info = await self._store.put_file(staged.key, staged.fd, 0, write)
                    staged.etag, staged.exclusive = info.etag, None
                    self._landed(staged, info)
        except ConflictError:
            logger.warning("%s was made by another node as well: its close fails", staged.key)
        except (StoreError, OSError) as error:
            logger.info("%s could not be reserved: %s", staged.key, error)

    # While it is written

    def wrote(self, staged: StagedFile, start: int, stop: int) -> None:
        staged.touch()
        if staged.kept_size is not None and start < staged.kept_size:
            staged.kept_size = None
        if staged.base is not None:
            staged.base.wrote(start, stop)
        self._drop(staged, start, stop)
        if start <= staged.written_to < stop:
            # A part is full with every few writes; looking each time would cost more.
            is_full = staged.written_to // IN_PARTS < stop // IN_PARTS
            staged.written_to = stop
            if is_full and stop >= AHEAD and not self._is_local(staged.key):
                self._send_ahead(staged)

    def truncated(self, staged: StagedFile, before: int, size: int) -> None:
        """Note that the file is `size` bytes long now, and was `before`."""
        staged.touch()
        staged.kept_size = None
        # Were it to grow again, parts behind its end would be taken for what it has there.
        self._drop(staged, size, max(size, before) + 1)
        staged.written_to = min(staged.written_to, size)
        if staged.base is not None:
            staged.base.size = min(staged.base.size, size)
            self._staging.record(staged)

    def _drop(self, staged: StagedFile, start: int, stop: int) -> None:
        """Forget the parts of which the file has other bytes now."""
        upload = staged.upload
        if upload is not None:
            for number in range(upload.part_at(start), upload.part_at(stop - 1) + 1):
                upload.drop(number)

    def _send_ahead(self, staged: StagedFile) -> None:
        """Have the full parts sent, if no task does that already."""
        if staged in self._aheads or staged.upload_state is not None or staged.is_unlinked:
            return
        if not self._prefix_lock.is_open_at(staged.key):
            return
        if staged.upload is None or _full_parts(staged, staged.upload):
            attempt = self._attempts.get(staged)
            work = attempt.work if attempt is not None else Work()
            ahead = self._aheads[staged] = StreamingUpload(work)
            self._nursery.start_soon(self._run_ahead, staged, ahead)

    async def _run_ahead(self, staged: StagedFile, ahead: StreamingUpload) -> None:
        try:
            with ahead.scope, ahead.work.doing():
                upload = staged.upload
                if upload is None:
                    # The time of the content is known at the end only.
                    metadata = replace(staged.described(), mtime_ns=None).as_metadata()
                    upload = await self._steps.begin(staged, metadata)
                while not ahead.is_last and (parts := _full_parts(staged, upload)):
                    await upload.send(staged.fd, parts, staged.written_to)
                    # Not every store tells of parts as much as it takes to know them again.
                    self._staging.record(staged)
        except Exception as error:  # the upload at the end would meet a fault as well
            why = judged(error)
            logger.info("%s could not be sent while it is written: %s", staged.key, why)
        finally:
            del self._aheads[staged]
            ahead.done.set()


def _full_parts(staged: StagedFile, upload: Upload) -> list[int]:
    """The parts that are written to their end and that the bucket does not have."""
    return [n for n in range(1, upload.part_at(staged.written_to)) if not upload.has(n)]
