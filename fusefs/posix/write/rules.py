"""The parts and rules that only a writable mount has."""

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
    """The settings for writing, which --help explains. All keys begin with `prefix`."""

    durability: PathRules[Durability] = EVERYWHERE_AUTO
    prefix: str = ""
    fails_on_conflict: bool = False
    may_delete: bool = True
    # The most files that are uploaded at once although no program waits for them.
    uploads: int = 80

    def durability_of(self, key: str) -> Durability:
        """The durability that a key's file has when fsync and close return."""
        return self.durability.of(key[len(self.prefix) :])

    @property
    def may_be_local(self) -> bool:
        """True if some path may have local durability."""
        return Durability.LOCAL in self.durability.values

    def is_local(self, key: str) -> bool:
        """True if fsync and close of a key's file need not wait for the bucket."""
        return self.durability_of(key) is Durability.LOCAL


@dataclass(frozen=True, slots=True)
class Writing:
    """The parts that only a writable mount has.

    Uploads, and changes whose caller was killed, run in `nursery`. The directory `renames` has
    the records of directory renames. `make_room` makes the cache free disk space. `aborts` are
    the multipart uploads that are to be aborted.
    """

    staging: Staging
    renames: Path
    nursery: trio.Nursery
    rules: WriteRules
    make_room: Callable[[], Awaitable[None]]
    aborts: PendingAborts
