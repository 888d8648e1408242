"""The upload tasks of staged files: their start, cancellation and outcome.

Each upload is a task of its own, which continues if a request that waits for it is cancelled (for
example because its program is killed). The task holds the file's lock, so that writes wait and no
object is a mix of two contents. upload_steps.py sends the requests. Uploads for which no program
waits queue for limited places, so that neither programs nor small files wait behind a backlog.

A file that is written from its start on is sent while it grows: each
part as soon as it is full, so that close has to wait for the last parts only.

A file whose upload fails stays staged and dirty, and the waiting requests fail. Rejected
credentials are no failure: the upload waits until they are renewed.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import trio

from fusefs.posix.nodes.edit_base import IN_PARTS
from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.nodes.prefix_lock import PrefixLock
from fusefs.posix.tasks import judged
from fusefs.posix.write import staged_sums
from fusefs.posix.write.exclusive import is_undecided
from fusefs.posix.write.rules import Writing
from fusefs.posix.write.sparse_edit import BaseLostError, SparseEditor
from fusefs.posix.write.upload_steps import CREATED_BY, UploadSteps, content_type
from fusefs.store.contract import Store, find
from fusefs.store.errors import (
    ConflictError,
    CredentialsError,
    StaleVersionError,
    StoreError,
    UnsupportedError,
)
from fusefs.store.fencing import without_token
from fusefs.store.interface import IF_ABSENT, ObjectInfo, Write
from fusefs.store.s3.multipart import Upload
from fusefs.telemetry.stalls import WaitCause, Work, stage, waiting_for

logger = logging.getLogger("fusefs.uploads")

# A growing file is sent from this size on, which is two parts.
AHEAD = 16 << 20
# The pause between attempts after S3 has rejected the credentials.
CREDENTIALS_S = 5.0
# An upload that waits for changes to stop waits for at most this many delays.
LONGEST_DELAYS = 5
# Longer than the few milliseconds between two closes of a program that writes small files.
QUIET_S = 0.2
# The first pause between two checks whether programs still close file after file.
LOOK_S = 1.0
# After this many conflicts with other clients' objects an upload fails; it is retried later.
MOST_CONFLICTS = 20
# The time limit for the upload of an open file: writes to the file wait meanwhile.
BACKGROUND_S = 20.0


@dataclass(slots=True, eq=False)
class UploadAttempt:
    """One upload of one file. `scope` may be cancelled while `is_cancellable`.

    A background upload, of an open file, is stopped after BACKGROUND_S, as writes wait for it.
    `hurry` cuts an upload's delay short; `error` is the error of a failed upload once it is `done`.
    `queueing` is cancelled once a program or command waits for the upload.
    """

    work: Work
    is_background: bool = False
    done: trio.Event = field(default_factory=trio.Event)
    hurry: trio.Event = field(default_factory=trio.Event)
    error: Exception | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    queueing: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_cancellable: bool = True

    def commit(self) -> None:
        """Make the attempt uncancellable: the next request may take effect in any case."""
        self.is_cancellable = False
        self.scope.deadline = math.inf


@dataclass(slots=True, eq=False)
class StreamingUpload:
    """The upload of a file's full parts while a program still writes the file.

    Its `work` is also that of the file's `UploadAttempt`, if any: a wait for the upload is a wait
    for these parts too. After `is_last` is set, no further part is begun here.
    """

    work: Work
    done: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_last: bool = False


class Uploader(UploadSteps):
    """The uploads of one mount. Belongs to the event loop.

    `landed` is called with an uploaded file and its new object; `kept_apart` with a file, its
    object under another key, and the object of another client under the file's own key, if any.
    `set_aside` is called with a file that yields its name to the given object: an edited file
    whose other bytes are lost, or a file whose attributes alone were to be sent.
    A caller that waits for an upload gets its StoreError or OSError; the file stays staged then.
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
        super().__init__(store, writing, editor)
        self._nursery = writing.nursery
        self._prefix_lock = prefix_lock
        self._landed = landed
        self._kept_apart = kept_apart
        self._set_aside = set_aside
        self._is_local = writing.rules.is_local
        self._places = [trio.Semaphore(writing.rules.uploads) for _ in ("small", "large")]
        self._attempts: dict[StagedFile, UploadAttempt] = {}
        self._aheads: dict[StagedFile, StreamingUpload] = {}
        self.failures = 0
        # The time (trio's) that is QUIET_S after the last close of a file that is uploaded later.
        self._quiet_at = 0.0

    # Starting and waiting

    async def wait(self, staged: StagedFile) -> None:
        """Wait until the bucket has a file's present content and attributes, or raise an error."""
        wanted = staged.changes
        while staged.is_dirty and (staged.uploaded < wanted or staged.is_meta_dirty):
            attempt = self._attempts.get(staged) or self.start(staged)
            attempt.hurry.set()
            attempt.queueing.cancel()
            with attempt.work.awaited():
                await attempt.done.wait()
            if attempt.error is not None:
                raise attempt.error

    def start(
        self, staged: StagedFile, delay_s: float = 0.0, *, is_background: bool = False
    ) -> UploadAttempt:
        """Return the running attempt, or start one in `delay_s` (`is_background`: file is open)."""
        attempt = self._attempts.get(staged)
        if attempt is None:
            ahead = self._aheads.get(staged)
            work = ahead.work if ahead is not None else Work()
            attempt = UploadAttempt(work, is_background)
            self._attempts[staged] = attempt
            self._nursery.start_soon(self._run, staged, attempt, delay_s)
        return attempt

    async def ended(self, staged: StagedFile) -> None:
        """Wait until a file's upload, if one is under way, has succeeded or failed."""
        if (attempt := self._attempts.get(staged)) is not None:
            with waiting_for(attempt.work):
                await attempt.done.wait()

    @asynccontextmanager
    async def locked(self, staged: StagedFile) -> AsyncIterator[None]:
        """Hold a file's lock; count a wait for an upload that has it as a wait for the upload."""
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
        """Hold a file's lock, to rename or remove the file: no write and no upload runs then.

        An upload under way is cancelled if it can't have changed the bucket yet, else waited for.
        A cancelled upload starts again afterwards, under the new key.
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
                await self.abandon(staged)

    async def give_up(self, staged: StagedFile) -> bool:
        """Set a file's changes aside, so that the bucket's object shows; False for an open file."""
        async with self.held(staged):
            if staged.inode.is_open:
                return False
            if staged.inode.staged is staged and staged.is_dirty:
                await self._leave_to_bucket(staged)
        return True

    async def _leave_to_bucket(self, staged: StagedFile) -> None:
        """Set a locked file's changes aside: its name shows the bucket's object then."""
        await self.abandon(staged)
        theirs = await find(self._store, staged.key)
        staged.is_meta_dirty = False
        self._set_aside(staged, theirs)

    async def _run(self, staged: StagedFile, attempt: UploadAttempt, delay_s: float) -> None:
        try:
            if delay_s:
                await self._until_left_alone(staged, attempt, delay_s)
            while staged.is_dirty:
                with attempt.scope, attempt.work.doing():
                    try:
                        async with self._locked_to_send(staged, attempt):
                            await self._upload(staged, attempt)
                        break
                    except CredentialsError as error:
                        staged.error = error
                        logger.warning("%s waits for other credentials: %s", staged.key, error)
                    # The lock is free here, so that writes to the file need not wait as well.
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
                # The content stays on the local disk for a while.
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
        """Wait until a file's name and attributes stay the same and no program closes many files.

        Uploads would take processor time from such a program. The wait lasts `delay_s` at least
        and LONGEST_DELAYS times that at most; `hurry` ends it.
        """
        begun, look_s = trio.current_time(), LOOK_S
        last = begun + LONGEST_DELAYS * delay_s
        while not attempt.hurry.is_set():
            now = trio.current_time()
            due = min(max(begun, staged.described_at) + delay_s, last)
            if due <= now:
                if last <= now or self._quiet_at <= now or self._staging.is_filling:
                    return
                due, look_s = min(now + look_s, last), 2 * look_s
            with trio.move_on_at(due):
                await attempt.hurry.wait()

    def note_closed(self) -> None:
        """Note the close of a file to be uploaded later; uploads wait until such closes pause."""
        self._quiet_at = trio.current_time() + QUIET_S

    @asynccontextmanager
    async def _locked_to_send(
        self, staged: StagedFile, attempt: UploadAttempt | None = None
    ) -> AsyncIterator[None]:
        """Hold a place, if it is needed, and a file's lock, once no rename blocks its key."""
        while True:
            await self._prefix_lock.until_open_at(lambda: staged.key)
            with ExitStack() as held:
                # Before the lock, for which writes to the file and renames wait.
                if attempt is not None and not attempt.queueing.cancel_called:
                    places = self._places[staged.size() > IN_PARTS]
                    with trio.CancelScope() as attempt.queueing:
                        await places.acquire()
                        held.callback(places.release)
                    is_limited = attempt.is_background and staged.inode.writing
                    if is_limited and not attempt.hurry.is_set():
                        attempt.scope.deadline = trio.current_time() + BACKGROUND_S
                # A free lock is taken at once; `acquire` would cost two turns of the event loop.
                if staged.lock.locked():
                    await staged.lock.acquire()
                else:
                    staged.lock.acquire_nowait()
                held.callback(staged.lock.release)
                if self._prefix_lock.is_open_at(staged.key):
                    yield
                    return

    async def _upload(self, staged: StagedFile, attempt: UploadAttempt) -> None:
        """Upload a locked file; after a conflict, retry, use another key, or set the file aside."""
        try:
            for is_last in (*(False,) * MOST_CONFLICTS, True):
                if not staged.is_dirty:
                    return  # the file was removed while this task waited for the lock
                staged.check_kept()  # `give_up` may have closed the descriptor meanwhile
                try:
                    await self._send(staged, attempt)
                    return
                except UnsupportedError:
                    if is_last or not self.lacks_conditions(staged):
                        raise
                except (ConflictError, StaleVersionError) as error:
                    if is_last or (staged.is_content_dirty and not self.is_careful(staged)):
                        raise
                    theirs = await find(self._store, staged.key)
                    if not await self.can_go_on(staged, theirs):
                        await self._yield_to(staged, theirs, error)
                        return
                finally:
                    attempt.is_cancellable = True
        except BaseLostError as error:
            await self._leave_to_bucket(staged)
            raise OSError(errno.ESTALE, "the object was replaced while it was edited") from error

    async def _send(self, staged: StagedFile, attempt: UploadAttempt) -> None:
        if (ahead := self._aheads.get(staged)) is not None:
            ahead.is_last = True  # no further part is begun ahead
            if staged.upload is None:
                await ahead.done.wait()  # the multipart upload is just beginning
        if staged.is_content_dirty:
            await staged_sums.check(staged)
        described, stamp = staged.meta_changes, staged.stamp()
        if staged.may_be_mapped:
            # A mapping's store changes the file's time only if its page has been written back.
            with suppress(OSError):  # a disk that is read-only by now can still be read
                await trio.to_thread.run_sync(os.fdatasync, staged.fd, limiter=self._disk)
        info = await self.send(staged, attempt.commit)
        base = staged.base
        if base is not None and base.file.is_complete:
            # If the old version was whole in the cache, the new one is made whole, too. Bytes that
            # can't be downloaded are left out: the bucket has the edit in any case.
            with suppress(StoreError, OSError):
                await self._editor.fill(base, staged.fd, 0, base.size)
        self.note_uploaded(staged, info, described)
        if attempt.is_background:
            staged.is_rewrite = False  # the old object has been replaced
        self._touch_stored(staged, stamp, info)
        self._landed(staged, info)

    def _touch_stored(self, staged: StagedFile, stamp: tuple[int, int], info: ObjectInfo) -> None:
        """Note stores through a mapping since `stamp`, after which `info` was sent."""
        if staged.may_be_mapped and staged.stamp() not in (stamp, (stamp[0], info.mtime_ns)):
            staged.touch()

    async def _yield_to(
        self, staged: StagedFile, theirs: ObjectInfo | None, error: Exception
    ) -> None:
        """Leave a key to the object `theirs` (None: no object); upload the content beside it.

        Raises EEXIST for a file that was to be new, else ESTALE, unless `theirs` has the content.
        """
        await self.abandon(staged)
        described, stamp = staged.meta_changes, staged.stamp()
        if theirs is not None and await self.is_content_of(theirs, staged):
            # Uploaded by an earlier process that died before it could record this.
            await self._store.confirm(theirs.key, theirs)
            self.note_uploaded(staged, theirs, described)
            # The object has the attributes of the earlier attempt.
            sent = without_token(theirs.metadata or {})
            staged.is_meta_dirty = sent != staged.described().as_metadata()
            self._touch_stored(staged, stamp, theirs)
            self._landed(staged, theirs)
            return
        if not staged.is_content_dirty:
            staged.is_meta_dirty = False
            self._set_aside(staged, theirs)
            raise OSError(errno.ESTALE, "replaced: its attributes are given up") from error
        is_exclusive = staged.exclusive is not None
        info = await self.store_beside(staged)
        self.note_uploaded(staged, info, described)
        self._kept_apart(staged, info, theirs)
        if is_exclusive:
            raise OSError(errno.EEXIST, "another node has made the file before") from error
        raise OSError(errno.ESTALE, "somebody else has replaced the object") from error

    def note_uploaded(self, staged: StagedFile, info: ObjectInfo, described: int) -> None:
        """Note that `info` has a file's content, and its attributes up to change `described`."""
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
        """Put an empty object for an open O_EXCL file, for other nodes to see; log failures."""
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

    # Files that are still being written

    def wrote(self, staged: StagedFile, start: int, stop: int, *, has_failed: bool = False) -> None:
        """Note a program's write to [start, stop); if it `has_failed`, a part may be written."""
        staged.touch()
        if staged.kept_size is not None and start < staged.kept_size:
            staged.kept_size = None
        if staged.base is not None and has_failed:
            staged.base.recover(staged.fd, start, stop)
        elif staged.base is not None:
            staged.base.wrote(start, stop)
        self._drop(staged, start, stop)
        if start <= staged.written_to < stop and not has_failed:
            # Parts are rarely filled, so this comparison saves a call for most writes.
            is_full = staged.written_to // IN_PARTS < stop // IN_PARTS
            staged.written_to = stop
            if is_full and stop >= AHEAD and not self._is_local(staged.key):
                self._send_ahead(staged)

    def truncated(self, staged: StagedFile, before: int, size: int) -> None:
        """Note that a program has changed a file's size from `before` to `size` bytes."""
        staged.touch()
        staged.kept_size = None
        # If the file grew again, old parts behind its end would count as its content.
        self._drop(staged, size, max(size, before) + 1)
        staged.written_to = min(staged.written_to, size)
        if staged.base is not None:
            staged.base.size = min(staged.base.size, size)
            self._staging.record(staged)

    def _drop(self, staged: StagedFile, start: int, stop: int) -> None:
        """Forget the uploaded parts of [start, stop), as the file has other bytes there now."""
        if (upload := staged.upload) is not None:
            for number in range(upload.part_at(start), upload.part_at(stop - 1) + 1):
                upload.drop(number)

    def _send_ahead(self, staged: StagedFile) -> None:
        """Start a task that sends a growing file's full parts, unless such a task runs already."""
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
                    # The content's modification time is known only at the end.
                    metadata = replace(staged.described(), mtime_ns=None).as_metadata()
                    upload = await self.begin(staged, metadata)
                while not ahead.is_last and (parts := _full_parts(staged, upload)):
                    await upload.send(staged.fd, parts, staged.written_to)
                    # Not every store's ListParts tells enough to recognise the parts later.
                    self._staging.record(staged)
        except Exception as error:  # the upload at the end meets any lasting error as well
            logger.info("%s could not be sent while it is written: %s", staged.key, judged(error))
        finally:
            del self._aheads[staged]
            ahead.done.set()


def _full_parts(staged: StagedFile, upload: Upload) -> list[int]:
    """The numbers of a growing file's full parts that the bucket does not have yet."""
    return [n for n in range(1, upload.part_at(staged.written_to)) if not upload.has(n)]
