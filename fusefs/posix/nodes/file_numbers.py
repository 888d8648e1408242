"""Inode numbers: a file keeps its st_ino when it is renamed, and no other file gets the number.

The number of a file that is new to this mount is a hash of its directory's number and its name, the
same after every mount and on any machine. As a renamed directory keeps its number, so do the files
below it; the files below a new directory of the old name get other numbers.

The hash is also the *place* of a name. A rename or a removal leaves a record for the place: the
number of the file that has the name now, or SPENT if the hash's own file was removed or renamed.
The next file of a SPENT name gets an unused number from the counter of the node ids. The records
are in the journal, for the next daemon.

Beyond MOST_RECORDS the oldest records of files that the kernel does not know are dropped: such a
file gets the hash of its place again, but never the number of a file that a program may have open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import islice

from fusefs.posix.journal.records import LEAST_HASH
from fusefs.posix.nodes.inode import Inode

# In a record, in place of a number: the place's own hash must not be used again.
SPENT = 0
# About 8 MiB.
MOST_RECORDS = 1 << 16
# An eighth of the records is examined at a time, because each time looks at all nodes as well.
_SHARE = 8
ROOT_ID = 1


class FileNumbers:
    """The inode numbers of a mount's files. Belongs to the event loop.

    `prefix` is the mount's prefix in the bucket. `log` writes a record to the journal, `new_number`
    returns an unused number, and `known` returns the numbers of all nodes that the kernel knows.
    """

    def __init__(
        self,
        prefix: str,
        log: Callable[[int, int], None],
        new_number: Callable[[], int],
        known: Callable[[], set[int]],
    ) -> None:
        self._log = log
        self._new_number = new_number
        self._known = known
        # The oldest first.
        self._records: dict[int, int] = {}
        self._most = MOST_RECORDS
        # Numbers below the root are the same as on a mount of the whole bucket.
        self._root = ROOT_ID
        for part in prefix.split("/")[:-1]:
            self._root = _hashed(self._root, part + "/")

    def adopt(self, records: dict[int, int]) -> None:
        self._records = records

    def records(self) -> Iterator[tuple[int, int]]:
        """Yield all records (place, number); the records may change during the iteration."""
        for place in list(self._records):
            if (number := self._records.get(place)) is not None:
                yield place, number

    def of(self, parent: Inode, name: str, *, is_directory: bool) -> int:
        """Return the number of the file that has a name now; choose one for a new file."""
        place = self._place(parent, name, is_directory)
        number = self._records.get(place, place)
        if number == SPENT:
            number = self._new_number()
            self._record(place, number)
        return number

    def removed(self, parent: Inode, name: str, *, is_directory: bool) -> None:
        """Note that a name was removed: its next file gets another number."""
        self._record(self._place(parent, name, is_directory), SPENT)

    def moved(
        self, parent: Inode, name: str, to: Inode, new_name: str, number: int, *, is_directory: bool
    ) -> None:
        """Note that a file was renamed: it keeps its number under the new name."""
        self._record(self._place(to, new_name, is_directory), number)
        self._record(self._place(parent, name, is_directory), SPENT)

    def give(self, inode: Inode, number: int) -> None:
        """Assign a number to the file of a node's name."""
        assert inode.parent is not None
        self._record(self._place(inode.parent, inode.name, False), number)

    def _place(self, parent: Inode, name: str, is_directory: bool) -> int:
        number = parent.ino if parent.parent is not None else self._root
        return _hashed(number, name + "/" if is_directory else name)

    def _record(self, place: int, number: int) -> None:
        self._records.pop(place, None)
        if number != place:
            self._records[place] = number
        self._log(place, number)
        if len(self._records) > self._most:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Drop the oldest records whose numbers the kernel does not know."""
        records, used = self._records, self._known()
        oldest = list(islice(records, len(records) // _SHARE))
        changed = [place for place in oldest if records[place] not in used]
        for place in changed:
            records[place] = SPENT
        used.update(records.values())
        for place in oldest:
            if records[place] == SPENT and place not in used:
                del records[place]
                self._log(place, place)
        for place in changed:
            if place in records:
                self._log(place, SPENT)
        # If most of the records stay, the next attempt comes only after many more changes.
        self._most = max(MOST_RECORDS, len(records) + MOST_RECORDS // (2 * _SHARE))


def _hashed(number: int, name: str) -> int:
    digest = blake2b(number.to_bytes(8, "little") + name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2 | LEAST_HASH
