"""A process that dies at a step of one's choice: a request, or a record on the disk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.posix.journal import journal
from fusefs.posix.journal.journal import Journal
from fusefs.posix.write.staging import Staging
from tests.support.memory_store import MemoryStore
from tests.support.survival.mortal_mount import DiedError, MortalMount

MOST_POINTS = 400


class Fate:
    """Kills after so many steps, once it has begun to count. From then on nothing gets done.

    A test has hundreds of processes, each with a journal: those are short.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._point = 0
        self._left: int | None = None
        self._has_killed = self._may_kill = False
        monkeypatch.setattr(journal, "STEP", 64 << 10)

    def mounts(
        self, directory: Path, make_store: Callable[[], MemoryStore] = MemoryStore
    ) -> Iterator[MortalMount]:
        """A new mount for each number of steps, up to the first by which nothing is killed.

        Requests to its bucket are steps. Where the bucket has nothing but `MemoryStore`, all the
        mounts have one cache.
        """
        for self._point in range(MOST_POINTS):
            cache = directory / "cache" if make_store is MemoryStore else None
            mount = MortalMount(directory / str(self._point), cache=cache)
            mount.store = make_store()
            mount.store.before = mount.store.after = self.step
            self._has_killed = False
            yield mount
            if not self._has_killed:
                return
        pytest.fail("it was never done")

    @contextmanager
    def process(self) -> Iterator[None]:
        """A process that may die, from `count` on; nothing dies behind the block."""
        self._may_kill = True
        try:
            yield
        except* DiedError:
            pass
        finally:
            self._left, self._may_kill = None, False

    def count(self) -> None:
        """Begin to count, within `process`."""
        if self._may_kill:
            self._left = self._point

    def step(self, *_: object) -> None:
        if self._left is not None:
            if self._left == 0:
                self._has_killed = True
                raise DiedError
            self._left -= 1


def fate_of_records(monkeypatch: pytest.MonkeyPatch) -> Fate:
    """A fate with a step before and one after each record; requests are the caller's to add."""
    fate = Fate(monkeypatch)
    append, record = Journal._append, Staging.record

    def append_or_die(self: Journal, *record: object) -> None:
        fate.step()
        append(self, *record)  # type: ignore[arg-type]
        fate.step()

    def record_or_die(self: Staging, *staged: object) -> None:
        fate.step()
        record(self, *staged)  # type: ignore[arg-type]
        fate.step()

    monkeypatch.setattr(Journal, "_append", append_or_die)
    monkeypatch.setattr(Staging, "record", record_or_die)
    return fate
