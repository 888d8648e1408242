"""Renames of directories: copies, then deletes, on record from the first to the last.

    DIRECTORY/NUMBER.json       from where to where, of which bucket, how far it is, and whose

- *copying*: the new prefix gets everything. If that fails, the copies are
  removed (*undoing*) and the rename has not taken place.
- *deleting*: everything is there under the new prefix, and the old objects go.

In between, this mount's nodes and files get their new names, in one step of the loop.
The record says *copying* until its end, but from its begin on also that it *switches*:
the next process gives the new name to what a kill has left out (`switches`).

At every moment each file is there under its old or its new name. A record that
no request waits for is finished by the process that finds it: a daemon that gets
the request again that the last one died over, or, after a crash of the machine,
the next mount. Then what is copied is not copied again (prefix_copy.py). This mount
changes nothing below either name until then (nodes/prefix_lock.py); `until_ns` is when the
youngest of what may be deleted was made, by the bucket's clock, for other clients do.
A mount that was detached while programs used it finishes its own: two that do would take
each other's failure for the end of the rename, and remove the only objects that are left.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
# How often what could not be finished is tried again.
RETRY_S = 5.0
# The same while there is nothing to be finished.
IDLE_S = 60.0
# Changes that wait for a rename and are described by name.
MOST_NAMED = 5

# Has this mount go along with a rename of which everything is copied, in one step of the
# loop and in the context that is given with it.
Switch = Callable[[PrefixCopy, Callable[[], AbstractContextManager[None]]], Awaitable[None]]


class Phase(enum.StrEnum):
    """The steps of a rename; see the module's text."""

    COPYING = "copying"
    UNDOING = "undoing"
    DELETING = "deleting"


@dataclass(slots=True, eq=False)
class RenameJob:
    """The rename of one directory, on record. `since_ns` is when it began; its task holds `lock`.

    `has_replaced` says that there was a directory of the new name, an empty
    one; `is_ours` that this process began it. `until_ns` as in the record. `is_safe` if
    the record of its phase is safe against a power cut. `known_at` is when this process
    came to know of it, in monotonic seconds.
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

    @property
    def since_ns(self) -> int:
        return int(self.path.stem)

    def pending(self) -> dict[str, Any]:
        """The entry of `fusefs sync` for it, as for a file that is uploaded."""
        error = self.closure.error
        return {
            "key": self.old,
            "bytes": 0,
            "since_s": time.monotonic() - self.known_at,
            "state": f"being renamed to {self.new}",
            "error": str(error) if error is not None else None,
        }

    def describe(self, waiting: list[str]) -> dict[str, Any]:
        """Its progress as plain data, and the keys that are to be changed and wait for it."""
        return {
            "from": self.old,
            "to": self.new,
            "phase": str(self.phase),
            "files": self.copies.total if self.copies is not None else 0,
            "copied": len(self.copies.made) if self.copies is not None else 0,
            "deleted": self.deleted,
            "since_s": max(0.0, (time.time_ns() - self.since_ns) / 1e9),
            "waiting": len(waiting),
            "waiting_keys": waiting[:MOST_NAMED],
        }


class RenameJobs:
    """The renames of one mount's directories that are not finished. Belongs to the event loop.

    `prefix` is what the mount shows of the bucket. `make_copies` makes the copies of an old
    prefix under a new one. `switch` is called when everything is copied: it has this mount's
    nodes go along. `ended(old, new, is_ours=…)` is
    called at the end of each.
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
        # Records of mounts that are out of sight and still served.
        self._others: list[Path] = []
        # Those in whose last step a process was killed: nodes may have the old names still.
        self._switches: list[RenameJob] = []
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for path in sorted(self._directory.glob("*.json")):
            self._load(path)

    def _load(self, path: Path) -> None:
        """Take up what an earlier process has left unfinished."""
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
        except (ValueError, KeyError, TypeError, AttributeError) as error:
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
            self._note(job)  # so that the next mount leaves it to this one
        self._unfinished.append(job)

    def switches(self) -> Iterator[RenameJob]:
        """Those in whose last step a process was killed, each until the next one is taken."""
        for job in self._switches:
            yield job
            # Else the next process would rename what was made under the old name since.
            self._note(job)
        self._switches = []

    def _is_served(self, mount: str) -> bool:
        """True if another mount of this mountpoint has a process."""
        try:
            directory = self._staging.directory.parent / mount
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not files.try_lock(fd)
        finally:
            os.close(fd)

    def look_at_others(self) -> None:
        """Take up what mounts that have ended meanwhile left unfinished."""
        others, self._others = self._others, []
        for path in others:
            self._load(path)

    def describe(self) -> list[dict[str, Any]]:
        """All that are not finished, as plain data: names, counts and seconds."""
        return [job.describe(self._prefix_lock.waiting(job.closure)) for job in self._unfinished]

    def unfinished(self, prefix: str) -> list[RenameJob]:
        """Those that move something at, above or below a prefix."""
        return [
            job
            for job in self._unfinished
            if any(one.startswith(prefix) or prefix.startswith(one) for one in (job.old, job.new))
        ]

    def hurry(self, prefix: str) -> None:
        """Have `run` try now what could not be finished."""
        for job in self.unfinished(prefix):
            self._prefix_lock.retry(job.closure)

    async def begin(self, closure: Closure, *, has_replaced: bool) -> RenameJob:
        """Put a rename on record, safe against a power cut; `closure` is kept until its end."""
        path = self._directory / f"{time.time_ns()}.json"
        old, new = closure.targets()
        job = RenameJob(path, closure, old, new, has_replaced, is_ours=True, is_safe=False)
        closure.is_kept = True
        self._unfinished.append(job)
        self._prefix_lock.wanted.set()  # `run` waits longer where there is nothing
        # `run` would take it for one that no request waits for.
        async with job.lock:
            try:
                await self._record(job)
            except OSError:
                self._end(job)
                raise
        return job

    async def finish(self, job: RenameJob) -> bool:
        """Take a rename to its end; if another task does already, wait for that.

        Tells whether it has taken place; else it was undone. It has when
        everything is there under the new name and objects can be deleted at
        all: those that could not be deleted yet are deleted later (`run`).
        """
        async with job.lock:
            if job in self._unfinished:
                await self._prefix_lock.wait_for_turn(job.closure)
                if job.phase == Phase.COPYING:
                    await self._copy(job)
                await self._complete(job)
            return job.phase == Phase.DELETING

    async def _copy(self, job: RenameJob) -> None:
        copies = job.copies = self._make_copies(job.old, job.new)
        try:
            # What an earlier process has copied it has no list of.
            listed = None if job.is_ours else await copies.recall()
            await copies.copy_all(listed)
            await self._switch(copies, partial(self._switching, job, copies))
        except (StoreError, OSError):
            if job.is_ours:
                job.until_ns = copies.newest_copy_ns()
            else:
                job.copies = None  # the copies of both processes are found by a listing
            job.phase = Phase.UNDOING
            try:
                await self._record(job)
            except OSError as error:
                logger.error("%s does not say that it is being undone: %s", job.path, error)
            await self._complete(job)
            raise

    @contextmanager
    def _switching(self, job: RenameJob, copies: PrefixCopy) -> Iterator[None]:
        """The rename takes place in this very step: what comes next is changed under the new name.

        That is on record before any of it can be acknowledged, and safe against a
        power cut before anything is deleted.
        """
        job.until_ns = copies.newest_source_ns()
        self._note(job, is_switching=True)
        yield
        job.phase = Phase.DELETING
        job.is_safe = False
        self._note(job)

    async def _complete(self, job: RenameJob) -> None:
        """Delete what was renamed, or the copies of an undone rename; later, if that fails now."""

        def note(count: int) -> None:
            job.deleted += count

        is_undone = job.phase == Phase.UNDOING
        try:
            if not is_undone and not job.is_safe:
                await self._record(job)
                job.is_safe = True
            if job.copies is None:
                copies = self._make_copies(job.old, job.new)
                await (copies.recall_made if is_undone else copies.recall_sources)(job.until_ns)
                job.copies = copies
            if is_undone:
                with trio.CancelScope(shield=True):
                    await job.copies.undo(keep=job.new if job.has_replaced else "")
            else:
                await job.copies.delete_sources(note)
        except (StoreError, OSError) as error:
            left = job.new if is_undone else job.old
            logger.warning("objects are left below %s, and removed later: %s", left, error)
            self._prefix_lock.fail(job.closure, error)
            return
        self._end(job)

    async def run(self) -> None:
        """Finish renames that no request waits for, until cancelled."""
        while True:
            self._prefix_lock.wanted = trio.Event()
            self.look_at_others()
            for job in list(self._unfinished):
                if job.lock.locked():
                    continue
                names = job.old, job.new
                logger.info("going on with the rename of %s to %s (%s)", *names, job.phase)
                try:
                    await self.finish(job)
                except (StoreError, OSError) as error:
                    logger.warning("the rename of %s to %s is undone: %s", *names, error)
                except Exception as error:  # the next process would meet this fault as well
                    self._prefix_lock.fail(job.closure, judged(error))
            with trio.move_on_after(RETRY_S if self._unfinished else IDLE_S):
                await self._prefix_lock.wanted.wait()

    # Records

    def _note(self, job: RenameJob, *, is_switching: bool = False) -> None:
        """Put on record what a rename is, if the disk takes it; not safe against a power cut."""
        try:
            files.replace(job.path, self._as_json(job, is_switching=is_switching))
        except OSError as error:
            logger.error("%s is an old record of a rename: %s", job.path, error)

    async def _record(self, job: RenameJob) -> None:
        """Put on record how far a rename is, safe against a power cut."""
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
        job.path.unlink(missing_ok=True)
        self._ended(job.old, job.new, is_ours=job.is_ours)
        self._prefix_lock.open(job.closure)
