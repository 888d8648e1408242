"""A process that dies at a step of one's choice: a request, or a record on the disk."""

import pytest

from fusefs.posix.journal import journal
from fusefs.posix.journal.journal import Journal
from fusefs.posix.write.staging import Staging
from tests.support.survival.mortal_mount import DiedError


class Fate:
    """Kills after so many steps, if it is set to. From then on nothing gets done.

    A test has hundreds of processes, each with a journal: those are short.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        monkeypatch.setattr(journal, "STEP", 64 << 10)

    def step(self, *_: object) -> None:
        if self.left is not None:
            if self.left == 0:
                raise DiedError
            self.left -= 1


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
