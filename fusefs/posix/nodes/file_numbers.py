"""Inode numbers: st_ino belongs to a file, under all its names, and to no other one.

A file that is new to this mount gets a hash of its directory's number and its name: it
is the same after every mount and on any machine. Because of the directory's
number nothing below a renamed directory changes, and what is put below a new directory of
the same name has other numbers.

A change of names leaves a record, by that hash, its *place*: either the number of the
file that has the name by now, or SPENT if the file that had it is gone or elsewhere.
Whatever gets the name next gets a number of its own, from the counter of the node ids, which
never yields one twice. The records are in the journal, so the next daemon has them.

Records have a limit. The oldest go, of files that the kernel does not know:
such a file gets the hash of its place again, but never that of a file which
somebody may have open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import islice

from fusefs.posix.nodes.inode import Inode

# In place of a number: no file that has it may have the name.
SPENT = 0
# All hashes are above all node ids.
LEAST_HASH = 1 << 62
# About 8 MiB.
MOST_RECORDS = 1 << 16
# This share of the records goes at a time: a look at all nodes is worth it.
_SHARE = 8
ROOT_ID = 1


class FileNumbers:
    """The inode numbers of a mount's files. Belongs to the event loop.

    `prefix` is the mount's own. `log` puts a record on record, `new_number` yields a number
    that was never used, and `known` are the numbers of all nodes of the kernel.
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
        # Below the root numbers are those of a mount of the whole bucket.
        self._root = ROOT_ID
        for part in prefix.split("/")[:-1]:
            self._root = _hashed(self._root, part + "/")

    def adopt(self, records: dict[int, int]) -> None:
        self._records = records

    def records(self) -> Iterator[tuple[int, int]]:
        """All records, each as it is when it is reached."""
        for place in list(self._records):
            number = self._records.get(place)
            if number is not None:
                yield place, number

    def of(self, parent: Inode, name: str, *, is_directory: bool) -> int:
        """The number of the file that has a name now; it keeps it."""
        place = self._place(parent, name, is_directory)
        number = self._records.get(place, place)
        if number == SPENT:
            number = self._new_number()
            self._record(place, number)
        return number

    def removed(self, parent: Inode, name: str, *, is_directory: bool) -> None:
        """Have the next file of a name get another number."""
        self._record(self._place(parent, name, is_directory), SPENT)

    def moved(
        self, parent: Inode, name: str, to: Inode, new_name: str, number: int, *, is_directory: bool
    ) -> None:
        """Let a file take its number along to another name."""
        self._record(self._place(to, new_name, is_directory), number)
        self._record(self._place(parent, name, is_directory), SPENT)

    def give(self, inode: Inode, number: int) -> None:
        """Let the file that has a node's name have this number."""
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
        """Drop old records of names whose files, if there are any, the kernel does not know."""
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
        # Else each change would look at all of them where most are in use.
        self._most = max(MOST_RECORDS, len(records) + MOST_RECORDS // (2 * _SHARE))


def _hashed(number: int, name: str) -> int:
    digest = blake2b(number.to_bytes(8, "little") + name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2 | LEAST_HASH
