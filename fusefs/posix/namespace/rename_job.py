"""Renames of directories: copies, then deletes, on record from the first to the last.

    DIRECTORY/NUMBER.json    from where to where, of which bucket, and how far it is

- *copying*: the new prefix gets everything. If that fails, the copies are
  removed (*undoing*) and the rename has not taken place.
- *deleting*: everything is there under the new prefix, and the old objects go.

At every moment each file is there under its old or its new name. A record that
no request waits for is finished by the process that finds it: a daemon that gets
the request again that the last one died over, or, after a crash of the machine,
the next mount. Then what is copied is not copied again (prefix_copy.py),
and what came into being under the old name after all had been copied stays.
"""

from __future__ import annotations

import enum
import json
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

from fusefs.linux import files
from fusefs.posix.namespace.prefix_copy import Copies, IsDated, delete_all
from fusefs.store.errors import StoreError
from fusefs.store.interface import Store

logger = logging.getLogger("fusefs.renaming")

# How often what could not be finished is tried again.
RETRY_S = 5.0
# The same while there is nothing to be finished.
IDLE_S = 60.0


class Phase(enum.StrEnum):
    COPYING = "copying"
    UNDOING = "undoing"
    DELETING = "deleting"


class Renaming:
    """One rename on record. `since_ns` is when it began; its task holds `lock`.

    `has_replaced` says that there was a directory of the new name, an empty
    one; `is_ours` that this process began it.
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
    ) -> None:
        self.path = path
        self.old = old
        self.new = new
        self.phase = phase
        self.has_replaced = has_replaced
        self.is_ours = is_ours
        self.lock = trio.Lock()
        self.copies: Copies | None = None
        self.deleted = 0
        # Some of the old objects could not be deleted yet.
        self.has_left_some = False
        # Why it could not be finished at the last try.
        self.error: StoreError | None = None
        self._began = time.monotonic()

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


class Renames:
    """The renames of one mount's directories. Belongs to the event loop.

    `source` says which bucket the mount is of and `prefix` what of it; `empty`
    and `is_dated` are for `Copies`. `switch` is called when everything is
    copied: it has this mount's nodes go along. `ended` is called for what another
    process had begun.
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        source: str,
        prefix: str,
        empty: int,
        is_dated: IsDated,
        switch: Callable[[Copies], Awaitable[None]],
        ended: Callable[[str, str], None],
    ) -> None:
        self._store = store
        self._directory = directory
        self._source = source
        self._empty = empty
        self._is_dated = is_dated
        self._switch = switch
        self._ended = ended
        self._unfinished = self._load(prefix)
        self._is_wanted = trio.Event()

    def _load(self, prefix: str) -> list[Renaming]:
        """What earlier processes have left unfinished."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        found = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                record = json.loads(path.read_text())
                source = record["source"]
                renaming = Renaming(
                    path,
                    record["old"],
                    record["new"],
                    phase=Phase(record["phase"]),
                    has_replaced=record["has_replaced"],
                    is_ours=False,
                )
                is_here = renaming.old.startswith(prefix) and renaming.new.startswith(prefix)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                logger.error("%s is damaged, a rename may be half done: %r", path, error)
                continue
            if source == self._source and is_here:
                found.append(renaming)
            else:
                logger.warning("%s: a rename of %s is not finished", path, source)
        return found

    def describe(self) -> list[dict[str, Any]]:
        """All that are not finished, as plain data: names, counts and seconds."""
        return [renaming.describe() for renaming in self._unfinished]

    def unfinished(self, prefix: str) -> list[Renaming]:
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

    def find(self, old: str, new: str) -> Renaming | None:
        """An unfinished rename."""
        for renaming in self._unfinished:
            if (renaming.old, renaming.new) == (old, new):
                return renaming
        return None

    async def finish_overlapping(self, *prefixes: str) -> None:
        """Have no unfinished rename at, above or below these prefixes.

        Raises:
            StoreError: one can't be finished now.
        """
        while (renaming := self._overlapping(*prefixes)) is not None:
            await self.finish(renaming)

    def _overlapping(self, *prefixes: str) -> Renaming | None:
        return next(
            (renaming for renaming in self._unfinished if renaming.overlaps(*prefixes)), None
        )

    async def begin(self, old: str, new: str, *, has_replaced: bool) -> Renaming:
        """Put a rename on record, safe against a power cut.

        Raises:
            OSError: the disk does not take it.
        """
        path = self._directory / f"{time.time_ns()}.json"
        renaming = Renaming(path, old, new, has_replaced=has_replaced, is_ours=True)
        self._unfinished.append(renaming)
        self._is_wanted.set()  # `run` waits longer where there is nothing
        # `run` would take it for one that no request waits for.
        async with renaming.lock:
            try:
                await self._record(renaming, Phase.COPYING)
            except OSError:
                self._end(renaming)
                raise
        return renaming

    async def finish(self, renaming: Renaming) -> bool:
        """Take a rename to its end; if another task does already, wait for that.

        Tells whether it has taken place; else it was undone. It has when
        everything is there under the new name and objects can be deleted at
        all: those that could not be deleted yet are deleted later (`run`).

        Raises:
            StoreError: it has not taken place. If this process has begun
                it, it is undone; else it stays on record.
        """
        async with renaming.lock:
            if renaming in self._unfinished:
                if renaming.phase == Phase.COPYING:
                    await self._copy(renaming)
                if renaming.phase == Phase.UNDOING:
                    await self._undo(renaming)
                else:
                    await self._delete(renaming)
            return renaming.phase == Phase.DELETING

    def _copies(self, renaming: Renaming) -> Copies:
        return Copies(self._store, renaming.old, renaming.new, self._empty, self._is_dated)

    async def _copy(self, renaming: Renaming) -> None:
        copies = renaming.copies = self._copies(renaming)
        try:
            await copies.bring(None if renaming.is_ours else await copies.recall())
            await self._switch(copies)
        except StoreError:
            # What another process may have deleted from cannot be taken back.
            if renaming.is_ours:
                await self._record(renaming, Phase.UNDOING)
                await self._undo(renaming)
            raise
        await self._record(renaming, Phase.DELETING)

    async def _undo(self, renaming: Renaming) -> None:
        copies = renaming.copies
        if copies is None:
            copies = renaming.copies = self._copies(renaming)
            await copies.recall()
        try:
            with trio.CancelScope(shield=True):
                await copies.undo(keep=renaming.new if renaming.has_replaced else "")
        except StoreError as error:
            logger.warning("copies are left below %s, and removed later: %s", renaming.new, error)
            renaming.error = error
            return
        self._end(renaming)

    async def _delete(self, renaming: Renaming) -> None:
        copies = renaming.copies
        kept: set[str] = set()
        if copies is None or renaming.has_left_some:
            copies = renaming.copies = self._copies(renaming)
            # What has no copy came into being since.
            kept = {info.key for info in await copies.recall()} - copies.sources.keys()
            copies.total = len(copies.sources)

        def note(count: int) -> None:
            renaming.deleted += count

        try:
            known = {key: source.etag for key, source in copies.sources.items()}
            await delete_all(self._store, known, note)
            await delete_all(self._store, dict.fromkeys(copies.folders() - kept))
        except StoreError as error:
            logger.warning("objects are left below %s, and removed later: %s", renaming.old, error)
            renaming.has_left_some, renaming.error = True, error
            return
        self._end(renaming)

    async def run(self) -> None:
        """Finish renames that no request waits for, until cancelled."""
        while True:
            self._is_wanted = trio.Event()
            for renaming in list(self._unfinished):
                if not renaming.lock.locked():
                    await self._finish_later(renaming)
            with trio.move_on_after(RETRY_S if self._unfinished else IDLE_S):
                await self._is_wanted.wait()

    async def _finish_later(self, renaming: Renaming) -> None:
        logger.info(
            "going on with the rename of %s to %s (%s)", renaming.old, renaming.new, renaming.phase
        )
        try:
            await self.finish(renaming)
        except StoreError as error:
            logger.warning("the rename of %s to %s waits: %s", renaming.old, renaming.new, error)
            renaming.error = error

    # Records

    async def _record(self, renaming: Renaming, phase: Phase) -> None:
        """Put on record how far a rename is, safe against a power cut."""
        renaming.phase = phase
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._write, renaming.path, self._as_json(renaming))

    def _write(self, path: Path, text: str) -> None:
        """Write a record, whole or not at all. Blocks."""
        files.replace(path, text, is_durable=True)

    def _as_json(self, renaming: Renaming) -> str:
        return json.dumps(
            {
                "source": self._source,
                "old": renaming.old,
                "new": renaming.new,
                "phase": str(renaming.phase),
                "has_replaced": renaming.has_replaced,
            }
        )

    def _end(self, renaming: Renaming) -> None:
        self._unfinished.remove(renaming)
        renaming.path.unlink(missing_ok=True)
        if not renaming.is_ours:
            self._ended(renaming.old, renaming.new)
