"""Renames of directories: copies, then deletes, on record from the first to the last.

    DIRECTORY/NUMBER.json       from where to where, of which bucket, how far it is, and whose
    DIRECTORY/NUMBER.touched    what was changed meanwhile (touched_keys.py)

- *copying*: the new prefix gets everything. If that fails, the copies are
  removed (*undoing*) and the rename has not taken place.
- *deleting*: everything is there under the new prefix, and the old objects go.

In between, this mount's nodes and files get their new names, in one step of the loop.
The record says *copying* until its end, but from its begin on also that it *switches*:
the next process gives the new name to what a kill has left out (`switches`).

At every moment each file is there under its old or its new name. A record that
no request waits for is finished by the process that finds it: a daemon that gets
the request again that the last one died over, or, after a crash of the machine,
the next mount. Then what is copied is not copied again (prefix_copy.py),
and what came into being under either name meanwhile stays: what this mount has
changed is on record, and `until_ns` is when the youngest of what may be deleted
was made, by the bucket's clock. A mount that was detached while programs used it
finishes its own: two that do would take each other's failure for the end of the
rename, and remove the only objects that are left.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from fusefs.linux import files
from fusefs.posix.namespace.prefix_copy import IsDated, PrefixCopy
from fusefs.posix.namespace.touched_keys import KeysTouchedMeanwhile, Phase, TouchedKeys
from fusefs.store.errors import StoreError
from fusefs.store.interface import Store

logger = logging.getLogger("fusefs.renaming")

# How often what could not be finished is tried again.
RETRY_S = 5.0
# The same while there is nothing to be finished.
IDLE_S = 60.0


# Has this mount go along with a rename of which everything is copied, in one step of the
# loop and in the context that is given with it.
Switch = Callable[[PrefixCopy, Callable[[], AbstractContextManager[None]]], Awaitable[None]]
TOUCHED = ".touched"


class RenameJob:
    """The rename of one directory, on record. `since_ns` is when it began; its task holds `lock`.

    `has_replaced` says that there was a directory of the new name, an empty
    one; `is_ours` that this process began it. `until_ns` as in the record; None where
    an earlier version has written it.
    """

    def __init__(
        self,
        path: Path,
        old: str,
        new: str,
        *,
        phase: Phase = Phase.COPYING,
        has_replaced: bool,
        is_ours: bool,
        until_ns: int | None = None,
    ) -> None:
        self.path = path
        self.old = old
        self.new = new
        self.touched = KeysTouchedMeanwhile(path.with_suffix(TOUCHED), old, new, phase)
        self.has_replaced = has_replaced
        self.is_ours = is_ours
        self.until_ns = until_ns
        # Whether the record of its phase is safe against a power cut.
        self.is_safe = not is_ours
        self.lock = trio.Lock()
        self.copies: PrefixCopy | None = None
        self.deleted = 0
        # Why it could not be finished at the last try.
        self.error: StoreError | OSError | None = None
        self._began = time.monotonic()

    @property
    def phase(self) -> Phase:
        return self.touched.phase

    @property
    def since_ns(self) -> int:
        return int(self.path.stem)

    def overlaps(self, *prefixes: str) -> bool:
        """Whether it moves something at, above or below one of the prefixes."""
        return any(
            own.startswith(prefix) or prefix.startswith(own)
            for own in (self.old, self.new)
            for prefix in prefixes
        )

    def pending(self) -> dict[str, Any]:
        """What `fusefs sync` waits for, as for a file that is uploaded.

        `since_s` counts from when this process knew of it.
        """
        return {
            "key": self.old,
            "bytes": 0,
            "since_s": time.monotonic() - self._began,
            "state": f"being renamed to {self.new}",
            "error": str(self.error) if self.error is not None else None,
        }

    def describe(self) -> dict[str, Any]:
        """How far it is, as plain data."""
        return {
            "from": self.old,
            "to": self.new,
            "phase": str(self.phase),
            "files": self.copies.total if self.copies is not None else 0,
            "copied": len(self.copies.made) if self.copies is not None else 0,
            "deleted": self.deleted,
            "since_s": max(0.0, (time.time_ns() - self.since_ns) / 1e9),
        }


class RenameJobs:
    """The renames of one mount's directories that are not finished. Belongs to the event loop.

    `source` says which bucket the mount is of and `prefix` what of it; `staging` is the
    directory that its process has locked; `empty` and `is_dated` are for `PrefixCopy`.
    `touched` gets to know what is renamed; changes through `store` are not noted there.
    `switch` is called when everything is copied: it has this mount's nodes go along.
    `ended` is called for what another process had begun.
    """

    def __init__(
        self,
        store: Store,
        touched: TouchedKeys,
        directory: Path,
        source: str,
        prefix: str,
        staging: Path,
        empty: int,
        is_dated: IsDated,
        switch: Switch,
        ended: Callable[[str, str], None],
    ) -> None:
        self._store = store
        self._touched = touched
        self._directory = directory
        self._source = source
        self._prefix = prefix
        self._staging = staging
        self._empty = empty
        self._is_dated = is_dated
        self._switch = switch
        self._ended = ended
        self._unfinished: list[RenameJob] = []
        # Records of mounts that are out of sight and still served.
        self._others: list[Path] = []
        # Those in whose last step a process was killed: nodes may have the old names still.
        self._switches: list[RenameJob] = []
        self._load()
        self._is_wanted = trio.Event()

    def _load(self) -> None:
        """Take up what earlier processes have left unfinished."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for path in self._directory.glob(f"*{TOUCHED}"):
            if not path.with_suffix(".json").exists():
                path.unlink()  # its rename was just finished
        for path in sorted(self._directory.glob("*.json")):
            self._load_one(path)

    def _load_one(self, path: Path) -> None:
        try:
            record = json.loads(path.read_text())
            source, mount = record["source"], str(record.get("mount", ""))
            renaming = RenameJob(
                path,
                record["old"],
                record["new"],
                phase=Phase(record["phase"]),
                has_replaced=record["has_replaced"],
                is_ours=False,
                until_ns=record.get("until_ns"),
            )
            is_switching = record.get("is_switching", False)
            prefix = self._prefix
            is_here = renaming.old.startswith(prefix) and renaming.new.startswith(prefix)
        except FileNotFoundError:
            return  # another mount has just finished it
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.error("%s is damaged, a rename may be half done: %r", path, error)
            return
        if source != self._source or not is_here:
            logger.warning("%s: a rename of %s is not finished", path, source)
            return
        is_inherited = mount == self._staging.name
        if not is_inherited and self._is_served(mount):
            logger.info("%s is left to the mount that has begun it", path)
            self._others.append(path)
            return
        if is_switching:
            renaming.touched.phase = Phase.DELETING
            renaming.is_safe = False
        if is_switching and is_inherited:
            self._switches.append(renaming)
        elif not is_inherited:
            self._note(renaming)  # so that the next mount leaves it to this one
        self._unfinished.append(renaming)
        self._touched.add(renaming.touched)

    def switches(self) -> Iterator[RenameJob]:
        """Those in whose last step a process was killed, each until the next one is taken."""
        for renaming in self._switches:
            yield renaming
            # Else the next process would rename what was made under the old name since.
            self._note(renaming)
        self._switches = []

    def _is_served(self, mount: str) -> bool:
        """Whether another mount of this mountpoint has a process; "" for an unknown one."""
        if not mount:
            return False
        try:
            fd = os.open(self._staging.parent / mount, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not files.try_lock(fd)
        finally:
            os.close(fd)

    def _look_at_others(self) -> None:
        """Take up what mounts that have ended meanwhile left unfinished."""
        others, self._others = self._others, []
        for path in others:
            self._load_one(path)

    def describe(self) -> list[dict[str, Any]]:
        """All that are not finished, as plain data: names, counts and seconds."""
        return [renaming.describe() for renaming in self._unfinished]

    def unfinished(self, prefix: str) -> list[RenameJob]:
        """Those that move something at, above or below a prefix."""
        return [renaming for renaming in self._unfinished if renaming.overlaps(prefix)]

    def hurry(self, prefix: str) -> None:
        """Have `run` try now what could not be finished."""
        for renaming in self.unfinished(prefix):
            renaming.error = None
        self._is_wanted.set()

    @property
    def are_finished(self) -> bool:
        return not self._unfinished

    def find(self, old: str, new: str) -> RenameJob | None:
        """An unfinished rename."""
        for renaming in self._unfinished:
            if (renaming.old, renaming.new) == (old, new):
                return renaming
        return None

    async def finish_overlapping(self, *prefixes: str) -> None:
        """Have no unfinished rename at, above or below these prefixes.

        Raises:
            StoreError, OSError: one can't be finished now.
        """
        while (renaming := self._overlapping(*prefixes)) is not None:
            await self.finish(renaming)
            if renaming in self._unfinished and renaming.error is not None:
                raise renaming.error

    def _overlapping(self, *prefixes: str) -> RenameJob | None:
        return next(
            (renaming for renaming in self._unfinished if renaming.overlaps(*prefixes)), None
        )

    async def begin(self, old: str, new: str, *, has_replaced: bool) -> RenameJob:
        """Put a rename on record, safe against a power cut.

        Raises:
            OSError: the disk does not take it.
        """
        path = self._directory / f"{time.time_ns()}.json"
        renaming = RenameJob(path, old, new, has_replaced=has_replaced, is_ours=True)
        self._unfinished.append(renaming)
        self._touched.add(renaming.touched)
        self._is_wanted.set()  # `run` waits longer where there is nothing
        # `run` would take it for one that no request waits for.
        async with renaming.lock:
            try:
                await self._record(renaming, Phase.COPYING)
            except OSError:
                self._end(renaming)
                raise
        return renaming

    async def finish(self, renaming: RenameJob) -> bool:
        """Take a rename to its end; if another task does already, wait for that.

        Tells whether it has taken place; else it was undone. It has when
        everything is there under the new name and objects can be deleted at
        all: those that could not be deleted yet are deleted later (`run`).

        Raises:
            StoreError, OSError: it has not taken place. If this process has begun
                it, it is undone; else it stays on record.
        """
        async with renaming.lock:
            if renaming in self._unfinished:
                if renaming.phase == Phase.COPYING:
                    await self._copy(renaming)
                if renaming.phase == Phase.UNDOING:
                    await self._undo(renaming, is_known=True)
                else:
                    await self._delete(renaming)
            return renaming.phase == Phase.DELETING

    def _copies(self, renaming: RenameJob) -> PrefixCopy:
        return PrefixCopy(
            self._store,
            renaming.touched,
            self._empty,
            self._is_dated,
            is_strict=renaming.is_ours,
        )

    async def _copy(self, renaming: RenameJob) -> None:
        listed, copies = None, renaming.copies
        if copies is None:
            copies = self._copies(renaming)
            # What an earlier process has copied it has no list of.
            listed = None if renaming.is_ours else await copies.recall()
            renaming.copies = copies
        try:
            await copies.copy_all(listed)
            await self._switch(copies, partial(self._switching, renaming, copies))
        except (StoreError, OSError):
            # What another process may have deleted from cannot be taken back.
            if renaming.is_ours:
                renaming.until_ns = copies.newest_copy_ns()
                await self._record_undoing(renaming)
                await self._undo(renaming, is_known=False)
            raise

    @contextmanager
    def _switching(self, renaming: RenameJob, copies: PrefixCopy) -> Iterator[None]:
        """The rename takes place in this very step: what comes next is changed under the new name.

        That is on record before any of it can be acknowledged, and safe against a
        power cut before anything is deleted.
        """
        renaming.until_ns = copies.newest_source_ns()
        self._note(renaming, is_switching=True)
        yield
        renaming.touched.phase = Phase.DELETING
        renaming.is_safe = False
        self._note(renaming)

    async def _record_undoing(self, renaming: RenameJob) -> None:
        try:
            await self._record(renaming, Phase.UNDOING)
        except OSError as error:
            logger.error("%s does not say that it is being undone: %s", renaming.path, error)

    async def _undo(self, renaming: RenameJob, *, is_known: bool) -> None:
        copies = renaming.copies
        if copies is None:
            copies = self._copies(renaming)
            await copies.recall_made(renaming.until_ns)
            renaming.copies = copies
        try:
            with trio.CancelScope(shield=True):
                keep = renaming.new if renaming.has_replaced else ""
                await copies.undo(keep=keep, is_known=is_known)
        except (StoreError, OSError) as error:
            logger.warning("copies are left below %s, and removed later: %s", renaming.new, error)
            renaming.error = error
            return
        self._end(renaming)

    async def _delete(self, renaming: RenameJob) -> None:
        def note(count: int) -> None:
            renaming.deleted += count

        try:
            if not renaming.is_safe:
                await self._record(renaming, Phase.DELETING)
                renaming.is_safe = True
            if renaming.copies is None:
                copies = self._copies(renaming)
                await copies.recall_sources(renaming.until_ns)
                renaming.copies = copies
            await renaming.copies.delete_sources(note)
        except (StoreError, OSError) as error:
            logger.warning("objects are left below %s, and removed later: %s", renaming.old, error)
            renaming.error = error
            return
        self._end(renaming)

    async def run(self) -> None:
        """Finish renames that no request waits for, until cancelled."""
        while True:
            self._is_wanted = trio.Event()
            self._look_at_others()
            for renaming in list(self._unfinished):
                if not renaming.lock.locked():
                    await self._finish_later(renaming)
            with trio.move_on_after(RETRY_S if self._unfinished else IDLE_S):
                await self._is_wanted.wait()

    async def _finish_later(self, renaming: RenameJob) -> None:
        logger.info(
            "going on with the rename of %s to %s (%s)", renaming.old, renaming.new, renaming.phase
        )
        try:
            await self.finish(renaming)
        except (StoreError, OSError) as error:
            logger.warning("the rename of %s to %s waits: %s", renaming.old, renaming.new, error)
            renaming.error = error
        except Exception as error:  # the next process would meet this fault as well
            logger.exception("a fault in the rename of %s to %s", renaming.old, renaming.new)
            renaming.error = OSError(errno.EIO, f"a fault of fusefs: {error!r}")

    # Records

    def _note(self, renaming: RenameJob, *, is_switching: bool = False) -> None:
        """Put on record what a rename is, if the disk takes it; not safe against a power cut."""
        try:
            files.replace(renaming.path, self._as_json(renaming, is_switching=is_switching))
        except OSError as error:
            logger.error("%s is an old record of a rename: %s", renaming.path, error)

    async def _record(self, renaming: RenameJob, phase: Phase) -> None:
        """Put on record how far a rename is, safe against a power cut."""
        renaming.touched.phase = phase
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._write, renaming.path, self._as_json(renaming))

    def _write(self, path: Path, text: str) -> None:
        """Write a record, whole or not at all. Blocks."""
        files.replace(path, text, is_durable=True)

    def _as_json(self, renaming: RenameJob, *, is_switching: bool = False) -> str:
        return json.dumps(
            {
                "source": self._source,
                "mount": self._staging.name,
                "old": renaming.old,
                "new": renaming.new,
                "phase": str(renaming.phase),
                "has_replaced": renaming.has_replaced,
                "until_ns": renaming.until_ns,
                "is_switching": is_switching,
            }
        )

    def _end(self, renaming: RenameJob) -> None:
        self._unfinished.remove(renaming)
        self._touched.remove(renaming.touched)
        renaming.path.unlink(missing_ok=True)
        renaming.touched.end()
        if not renaming.is_ours:
            self._ended(renaming.old, renaming.new)
