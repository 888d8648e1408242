"""Renames of directories, with a record on the disk: copy all objects, then delete the old ones.

    DIRECTORY/NUMBER.json       the record: both prefixes, bucket, phase, mount

- *copying*: all objects are copied below the new prefix. If that fails, the copies are
  removed (*undoing*) and the rename has not taken place.
- *deleting*: all objects exist below the new prefix, and the old objects are deleted.

Between the two, this mount's nodes and files get their new names, in one step of the loop,
the *switch*. During the switch the record says *copying* and `is_switching`; after a kill
the next process renames the nodes and files that were left out (`switches`).

At every moment each file exists under its old or its new name. An interrupted rename is finished by
the process that finds its record: the next daemon, to which the kernel sends the request again, or,
after a crash of the machine, the next mount. Objects with a copy are not copied again
(prefix_copy.py). This mount changes nothing below either prefix until then (nodes/prefix_lock.py),
but other clients may: objects younger than `until_ns`, by the bucket's clock, are not deleted. A
mount that was detached while programs used it finishes its own renames: two mounts would take each
other's failures for the end of the rename, and delete the only objects left.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

from fusefs.linux import files
from fusefs.posix.namespace.prefix_copy import PrefixCopy
from fusefs.posix.nodes.prefix_lock import Closure, PrefixLock
from fusefs.posix.tasks import judged
from fusefs.posix.write.rules import Writing
from fusefs.store.errors import StoreError

logger = logging.getLogger("fusefs.renaming")

FORMAT = 2
# The pause between attempts to finish a rename.
RETRY_S = 5.0
# The same pause while no rename is unfinished.
IDLE_S = 60.0
# The longest wait of a program whose rename has failed for the cache disk to take the record.
GIVE_UP_S = 60.0
# The most changes waiting for a rename whose keys `describe` lists.
MOST_NAMED = 5

# Renames this mount's nodes and files once all objects are copied, in one step of the
# loop, inside the context manager that is the second argument.
Switch = Callable[[PrefixCopy, Callable[[], AbstractContextManager[None]]], Awaitable[None]]


class Phase(enum.StrEnum):
    """The phases of a rename: copying, deleting the old objects; or, after a failure, undoing."""

    COPYING = "copying"
    UNDOING = "undoing"
    DELETING = "deleting"


@dataclass(slots=True, eq=False)
class RenameJob:
    """The recorded rename of one directory. The task that works on it holds `lock`.

    The record's NUMBER is the time at which the rename began (ns since the epoch). `has_replaced`:
    there was an empty directory of the new name; `is_ours`: this process began the rename. Objects
    younger than `until_ns` stay. `is_safe`: the record of the phase is safe against a power cut.
    `known_at` is the time at which this process began or found the rename, in monotonic seconds.
    """

    path: Path
    closure: Closure
    old: str
    new: str
    has_replaced: bool
    is_ours: bool
    is_safe: bool
    phase: Phase = Phase.COPYING
    until_ns: int | None = None
    copies: PrefixCopy | None = None
    deleted: int = 0
    lock: trio.Lock = field(default_factory=trio.Lock)
    known_at: float = field(default_factory=time.monotonic)

    def pending(self) -> dict[str, Any]:
        """The rename as an entry for `fusefs sync`, like the entry of a file being uploaded."""
        error = self.closure.error
        return {
            "key": self.old,
            "bytes": 0,
            "since_s": time.monotonic() - self.known_at,
            "state": f"being renamed to {self.new}",
            "error": str(error) if error is not None else None,
        }

    def describe(self, waiting: list[str]) -> dict[str, Any]:
        """The rename's progress as plain data, with the keys whose changes wait for it."""
        return {
            "from": self.old,
            "to": self.new,
            "phase": str(self.phase),
            "files": self.copies.total if self.copies is not None else 0,
            "copied": len(self.copies.made) if self.copies is not None else 0,
            "deleted": self.deleted,
            "since_s": max(0.0, (time.time_ns() - int(self.path.stem)) / 1e9),
            "waiting": len(waiting),
            "waiting_keys": waiting[:MOST_NAMED],
        }


class RenameJobs:
    """The unfinished directory renames of one mount. Belongs to the event loop.

    `prefix` is the prefix of the mount. `make_copies` returns the `PrefixCopy` of an old and a
    new prefix. `switch` is called when all objects are copied, to rename the mount's nodes.
    `ended(old, new, is_ours=…)` is called at the end of each rename.
    """

    def __init__(
        self,
        writing: Writing,
        prefix: str,
        prefix_lock: PrefixLock,
        make_copies: Callable[[str, str], PrefixCopy],
        switch: Switch,
        ended: Callable[..., None],
    ) -> None:
        self._directory = writing.renames
        self._staging = writing.staging
        self._prefix = prefix
        self._prefix_lock = prefix_lock
        self._make_copies = make_copies
        self._switch = switch
        self._ended = ended
        self._unfinished: list[RenameJob] = []
        # Records of mounts that were detached and still have a process.
        self._others: list[Path] = []
        # Renames during whose switch a process was killed: some nodes may have old names.
        self._switches: list[RenameJob] = []
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for path in sorted(self._directory.glob("*.json")):
            self._load(path)

    def _load(self, path: Path) -> None:
        """Read a rename's record; take the rename over, unless another running mount began it."""
        try:
            record = json.loads(path.read_text())
            if record.get("format") != FORMAT:
                logger.error(
                    "%s is of another version of fusefs, which is to finish this rename", path
                )
                return
            source, mount = record["source"], record["mount"]
            old, new, phase = record["old"], record["new"], Phase(record["phase"])
            has_replaced, until_ns = record["has_replaced"], record["until_ns"]
            is_switching = record["is_switching"]
            is_here = old.startswith(self._prefix) and new.startswith(self._prefix)
        except FileNotFoundError:
            return  # another mount has just finished it
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.error("%s is damaged, a rename may be half done: %r", path, error)
            return
        if source != self._staging.source or not is_here:
            logger.warning("%s: a rename of %s is not finished", path, source)
            return
        is_inherited = mount == self._staging.directory.name
        if not is_inherited and self._is_served(mount):
            logger.info("%s is left to the mount that has begun it", path)
            self._others.append(path)
            return
        job = RenameJob(
            path,
            self._prefix_lock.close(old, new),
            old,
            new,
            has_replaced,
            is_ours=False,
            is_safe=not is_switching,
            phase=Phase.DELETING if is_switching else phase,
            until_ns=until_ns,
        )
        if is_switching and is_inherited:
            self._switches.append(job)
        elif not is_inherited:
            self._note(job)  # now with this mount's name, so that the next mount leaves it alone
        self._unfinished.append(job)

    def switches(self) -> Iterator[RenameJob]:
        """Yield the renames during whose switch a process was killed; the caller completes each."""
        for job in self._switches:
            yield job
            # Otherwise the next process would also rename files made under the old name since.
            self._note(job)
        self._switches = []

    def _is_served(self, mount: str) -> bool:
        """True if another mount's process has locked its staging directory `mount`, or may have."""
        try:
            directory = self._staging.directory.parent / mount
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        with files.closing(fd):
            return not files.try_lock(fd)

    def describe(self) -> list[dict[str, Any]]:
        """Describe all unfinished renames as plain data."""
        return [job.describe(self._prefix_lock.waiting(job.closure)) for job in self._unfinished]

    def pending(self, key: str, *, hurry: bool = False) -> list[dict[str, Any]]:
        """The unfinished renames at, above or below a key; with `hurry` they are retried now."""
        below = key if not key or key.endswith("/") else key + "/"
        found = [
            job
            for job in self._unfinished
            if any(one.startswith(below) or below.startswith(one) for one in (job.old, job.new))
        ]
        for job in found if hurry else ():
            self._prefix_lock.retry(job.closure)
        return [job.pending() for job in found]

    async def begin(self, closure: Closure, *, has_replaced: bool) -> RenameJob:
        """Record a rename, safe against a power cut; `closure` stays closed until the end."""
        path = self._directory / f"{time.time_ns()}.json"
        old, new = closure.targets()
        job = RenameJob(path, closure, old, new, has_replaced, is_ours=True, is_safe=False)
        closure.is_kept = True
        self._unfinished.append(job)
        self._prefix_lock.wanted.set()  # ends the long pause of `run`
        # The lock keeps `run` from taking over the rename before it is recorded.
        async with job.lock:
            try:
                await self._record(job)
            except OSError:
                # If the record is there, the next process goes on with the rename.
                if not os.access(job.path, os.F_OK):
                    self._end(job)
                    raise
        return job

    async def finish(self, job: RenameJob) -> bool:
        """Finish a rename, or wait until another task has; return True if done, False if undone.

        A rename is done when all objects exist under the new name and deletes are allowed:
        `run` later deletes the old objects that could not be deleted yet.
        """
        try:
            async with job.lock:
                if job in self._unfinished:
                    await self._prefix_lock.wait_for_turn(job.closure)
                    if job.phase == Phase.COPYING:
                        await self._copy(job)
                    await self._complete(job)
                return job.phase == Phase.DELETING
        except (StoreError, OSError):
            # The next process would carry out a rename of which the program knows that it failed.
            with trio.move_on_after(GIVE_UP_S):
                while job.is_ours and job in self._unfinished and not job.is_safe:
                    await trio.sleep(RETRY_S)
                    await self.finish(job)
            raise

    async def _copy(self, job: RenameJob) -> None:
        copies = job.copies = self._make_copies(job.old, job.new)
        try:
            # Copies of an earlier process are found by a listing.
            await copies.copy_all(None if job.is_ours else await copies.recall())
            await self._switch(copies, partial(self._switching, job, copies))
        except (StoreError, OSError):
            if job.is_ours:
                job.until_ns = copies.newest_copy_ns()
            else:
                job.copies = None  # a listing will find the copies of both processes
            job.phase, job.is_safe = Phase.UNDOING, False
            await self._complete(job)
            raise

    @contextmanager
    def _switching(self, job: RenameJob, copies: PrefixCopy) -> Iterator[None]:
        """Record the switch before and after this block, in which the caller makes it.

        The second record is written before a change under the new name can be acknowledged, and
        made safe against a power cut before any object is deleted.
        """
        job.until_ns = max((info.mtime_ns for info in copies.sources.values()), default=0)
        self._note(job, is_switching=True)
        yield
        job.phase = Phase.DELETING
        job.is_safe = False
        self._note(job)

    async def _complete(self, job: RenameJob) -> None:
        """Delete the old objects, or an undone rename's copies; `run` tries again if that fails."""

        def note(count: int) -> None:
            job.deleted += count

        is_undone = job.phase == Phase.UNDOING
        try:
            if not job.is_safe:
                with suppress(OSError) if is_undone else nullcontext():
                    await self._record(job)
                    job.is_safe = True
            if job.copies is None:
                copies = self._make_copies(job.old, job.new)
                await (copies.recall_made if is_undone else copies.recall_sources)(job.until_ns)
                job.copies = copies
            if is_undone:
                with trio.CancelScope(shield=True):
                    await job.copies.undo(keep=job.new if job.has_replaced else "")
                if not job.is_safe:
                    job.path.unlink(missing_ok=True)  # a full disk permits this
            else:
                await job.copies.delete_sources(note)
        except (StoreError, OSError) as error:
            if str(error) != str(job.closure.error):
                what = "objects are left below %s, and removed later: %s"
                if is_undone and not job.is_safe:
                    what = "the next mount makes the failed rename to %s unless the disk works: %s"
                logger.warning(what, job.new if is_undone else job.old, error)
            self._prefix_lock.fail(job.closure, error)
            return
        self._end(job)

    async def run(self) -> None:
        """Finish renames that no request waits for, until cancelled."""
        while True:
            self._prefix_lock.wanted = trio.Event()
            # Take over the unfinished renames of mounts that have ended meanwhile.
            others, self._others = self._others, []
            for path in others:
                self._load(path)
            for job in list(self._unfinished):
                # Only this task retries an earlier rename, so it must not wait for one.
                is_later = any(one.closure.is_before(job.closure) for one in self._unfinished)
                if job.lock.locked() or is_later:
                    continue
                names = job.old, job.new
                logger.info("going on with the rename of %s to %s (%s)", *names, job.phase)
                try:
                    await self.finish(job)
                except (StoreError, OSError) as error:
                    logger.warning("the rename of %s to %s is undone: %s", *names, error)
                except Exception as error:  # a fault must not end this task: it would recur
                    self._prefix_lock.fail(job.closure, judged(error))
            with trio.move_on_after(RETRY_S if self._unfinished else IDLE_S):
                await self._prefix_lock.wanted.wait()

    # Records

    def _note(self, job: RenameJob, *, is_switching: bool = False) -> None:
        """Write a rename's record, not synced; an error of the disk is only logged."""
        try:
            files.replace(job.path, self._as_json(job, is_switching=is_switching))
        except OSError as error:
            logger.error("%s is an old record of a rename: %s", job.path, error)

    async def _record(self, job: RenameJob) -> None:
        """Write a rename's record, safe against a power cut; OSError if the disk fails."""
        write = partial(files.replace, job.path, self._as_json(job), is_durable=True)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(write)

    def _as_json(self, job: RenameJob, *, is_switching: bool = False) -> str:
        return json.dumps(
            {
                "format": FORMAT,
                "source": self._staging.source,
                "mount": self._staging.directory.name,
                "old": job.old,
                "new": job.new,
                "phase": str(job.phase),
                "has_replaced": job.has_replaced,
                "until_ns": job.until_ns,
                "is_switching": is_switching,
            }
        )

    def _end(self, job: RenameJob) -> None:
        self._unfinished.remove(job)
        try:
            job.path.unlink(missing_ok=True)
        except OSError as error:  # changes that wait for the rename go on all the same
            logger.error("%s is the record of a rename that has ended: %s", job.path, error)
        self._ended(job.old, job.new, is_ours=job.is_ours)
        self._prefix_lock.open(job.closure)
