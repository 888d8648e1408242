"""The parts and rules that a writable mount has beside those of a read-only one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from fusefs.posix.write.aborts import PendingAborts
from fusefs.posix.write.staging import Staging
from fusefs.settings.patterns import PathRules
from fusefs.settings.types import EVERYWHERE_AUTO, Durability


@dataclass(frozen=True, slots=True)
class WriteRules:
    """Rules of writing; see the settings of the same names. The keys begin with `prefix`."""

    durability: PathRules[Durability] = EVERYWHERE_AUTO
    prefix: str = ""
    fails_on_conflict: bool = False
    may_delete: bool = True

    def durability_of(self, key: str) -> Durability:
        """The place of a key's file when fsync and close return."""
        return self.durability.of(key[len(self.prefix) :])

    @property
    def may_be_local(self) -> bool:
        """True if some path may have local durability."""
        return Durability.LOCAL in self.durability.values

    def is_local(self, key: str) -> bool:
        """True if the local disk is enough for the file of a key."""
        return self.durability_of(key) is Durability.LOCAL


@dataclass(frozen=True, slots=True)
class Writing:
    """The parts that a writable mount has beside those of a read-only one.

    Uploads, and changes whose caller was killed, run in `nursery`. Renames of
    directories are on record in the directory `renames`. `make_room` has the
    cache give up what the disk needs. `aborts` are uploads of a file that are to end.
    """

    staging: Staging
    renames: Path
    nursery: trio.Nursery
    rules: WriteRules
    make_room: Callable[[], Awaitable[None]]
    aborts: PendingAborts
