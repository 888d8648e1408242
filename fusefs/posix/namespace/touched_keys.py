"""Keys that are changed below a directory's prefixes while its rename is not finished.

    DIRECTORY/NUMBER.touched    beside the rename's record: keys, and in which phase (line_log.py)

A rename works from listings, and a process that goes on with it after a kill sees
objects, but not why they are there: what is under the new name may be a copy, or
have been saved there since. So whatever else this mount changes at or below either
prefix is on record before it is acknowledged (settled_store.py), and the rename does
not change such a key any more. A change waits until the rename's own request for
its key, if one is under way, has been answered.

As long as no rename is unfinished, all of this is a look at an empty list.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from fusefs.posix.journal.line_log import LineLog, line, load_lines


class Phase(enum.StrEnum):
    """How far a rename is; see rename_job.py."""

    COPYING = "copying"
    UNDOING = "undoing"
    DELETING = "deleting"


class KeysTouchedMeanwhile:
    """The keys that were changed during one rename, which is in `phase`.

    `changed` are those below the old prefix that were changed since they were copied.
    """

    def __init__(self, path: Path, old: str, new: str, phase: Phase) -> None:
        self.old = old
        self.new = new
        self.phase = phase
        self._log = LineLog(path)
        self._phases = {key: str(fields[0]) for key, fields in load_lines(path).items()}
        self.changed = {key for key in self._phases if key.startswith(old)}
        self._sent: list[frozenset[str]] = []
        self._answered = trio.Event()

    def covers(self, key: str) -> bool:
        return key.startswith((self.old, self.new))

    def has(self, key: str) -> bool:
        """Whether a key was changed since the rename began."""
        return key in self._phases

    def has_since(self, key: str) -> bool:
        """Whether a key was changed since the phase that the rename is in began."""
        return self._phases.get(key) == self.phase

    def has_files(self) -> bool:
        """Whether files were made or changed below the new prefix."""
        return any(key.startswith(self.new) and key[-1] != "/" for key in self._phases)

    def note(self, key: str) -> None:
        """Put on record that a key is changed.

        Raises:
            OSError: the disk does not take it.
        """
        is_old = key.startswith(self.old)
        if is_old:
            self.changed.add(key)
        # Under the new name it matters whether a key was changed before the rename took place.
        is_known = self.has_since(key) if is_old else self.has(key)
        if not is_known:
            self._log.append(line([key, str(self.phase)]))
            self._phases[key] = str(self.phase)

    @contextmanager
    def sending(self, keys: Iterable[str]) -> Iterator[frozenset[str]]:
        """Have a request of the rename under way, for those of the keys that are still its own."""
        own = frozenset(key for key in keys if self._is_own(key))
        self._sent.append(own)
        try:
            yield own
        finally:
            self._sent.remove(own)
            self._answered.set()
            self._answered = trio.Event()

    def _is_own(self, key: str) -> bool:
        # What was changed under the old name before the rename took place has been copied since.
        return not (self.has_since(key) if key.startswith(self.old) else self.has(key))

    async def answered(self, key: str) -> None:
        """Wait until no request of the rename for a key is under way."""
        while any(key in keys for keys in self._sent):
            await self._answered.wait()

    def end(self) -> None:
        """The rename is finished."""
        self._log.close(remove=True)


class TouchedKeys:
    """Those of all unfinished renames of a mount. Belongs to the event loop."""

    def __init__(self) -> None:
        self._unfinished: list[KeysTouchedMeanwhile] = []

    def add(self, touched: KeysTouchedMeanwhile) -> None:
        self._unfinished.append(touched)

    def remove(self, touched: KeysTouchedMeanwhile) -> None:
        self._unfinished.remove(touched)

    def covers(self, key: str) -> bool:
        """Whether a key is at or below a prefix of an unfinished rename."""
        return any(touched.covers(key) for touched in self._unfinished)

    def note(self, keys: Iterable[str]) -> None:
        """Put on record which keys are changed, where that matters to a rename.

        Raises:
            OSError: the disk does not take it.
        """
        if self._unfinished:
            for key in keys:
                for touched in self._unfinished:
                    if touched.covers(key):
                        touched.note(key)

    async def touch(self, keys: Iterable[str]) -> None:
        """As `note`; returns when no rename changes these keys any more."""
        if self._unfinished:
            keys = list(keys)
            self.note(keys)
            for key in keys:
                for touched in list(self._unfinished):
                    await touched.answered(key)
