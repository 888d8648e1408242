"""Decides which objects need no HEAD.

Listings have no user metadata, and a HEAD for each file costs as much as reading it. Most buckets
were filled by programs that write no attributes. So HEADs are sent for a few objects of a directory
(`SAMPLE`, head_cache.py), including the smallest and the youngest: a symbolic link is small, and a
changed object is young. If these have no attributes, the other objects are assumed to have none,
and so are those of sibling directories whose objects have the same times: a data set is uploaded at
one time, by one program. After EXPERIENCE objects in a row without attributes, in any directories,
a sample of one is enough.

This is safe enough because one object with attributes ends the assumption for its directory and its
siblings; an object younger than those without attributes gets a HEAD; and nothing is assumed of a
directory in which this mount, or an earlier mount with the same cache, made a change. Before an
object is changed, it always gets its HEAD.

A read-only mount is for data sets of many files, so it sends fewer HEADs: for the smallest and the
youngest object, and, without a sample, only for files small enough to be a symbolic link.
Attributes that equal the mount's defaults, times aside, count as none, but then a full sample has
to decide. A wrong assumption shows when the object is read, or when a program is denied access
(head_cache.py).
"""

from __future__ import annotations

import json
import logging
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fusefs.posix.nodes.names import parent_of

logger = logging.getLogger("fusefs.posix")

SAMPLE = 16
EXPERIENCE = 128
# The smallest object of a directory, and the youngest.
READ_ONLY_SAMPLE = 2
# The time by which an object may be younger than those without attributes and, in a sibling
# directory, also older; in nanoseconds.
SAME_TIME_NS = 600 * 10**9
# The most directories that are remembered, at about 200 bytes for each.
MOST_DIRECTORIES = 100_000
# With more changed directories recorded, nothing is assumed.
MOST_CHANGED = 20_000


@dataclass(slots=True)
class _Directory:
    """The results of HEADs in one directory, or in all directories of one parent."""

    without: int = 0
    oldest_ns: float = math.inf
    youngest_ns: int = 0
    has_attributes: bool = False
    # An object has attributes that equal the mount's defaults.
    has_usual: bool = False


class Assumed(NamedTuple):
    """The Last-Modified up to which a directory's objects are assumed to have no attributes.

    In ns since the epoch; `links` is for objects small enough to be symbolic links, `others` for
    all other objects.
    """

    links: float
    others: float


class HeadPolicy:
    """Decides which objects of a bucket are assumed to lack attributes. For the event loop.

    The directories that a mount changes are written to `record`, a file of the cache that each
    mount reads at its start; if `record` is None, only this mount knows these directories.
    """

    def __init__(self, record: Path | None = None, *, is_read_only: bool = False) -> None:
        # True if fewer HEADs are sent, as explained above.
        self.asks_less = is_read_only
        self._record = record
        self._directories: OrderedDict[str, _Directory] = OrderedDict()
        # By parent: the facts about all its directories that were sampled.
        self._alike: OrderedDict[str, _Directory] = OrderedDict()
        self._without_in_a_row = 0
        self._changed = _read(record) if record is not None else set()
        # True once too many directories were changed.
        self._assumes_nothing = len(self._changed) > MOST_CHANGED

    def has_no_attributes(self, prefix: str, modified_ns: int) -> bool:
        """True if an object with this Last-Modified (0: a marker) is assumed to lack attributes."""
        return modified_ns <= self.no_attributes_until(prefix)

    def assumed(self, prefix: str) -> Assumed:
        """The Last-Modified up to which a directory's objects are assumed to lack attributes."""
        until = self.no_attributes_until(prefix)
        if not self.asks_less:
            return Assumed(until, until)
        says_something = self.has_attributes(prefix) or (until < 0 and self.has_usual(prefix))
        return Assumed(until, until if says_something else math.inf)

    def has_attributes(self, prefix: str) -> bool:
        """True if an object of a directory is known to have attributes."""
        directory = self._directories.get(prefix)
        return directory is not None and directory.has_attributes

    def has_usual(self, prefix: str) -> bool:
        """True if objects of a directory have attributes, all equal to the mount's defaults."""
        directory = self._directories.get(prefix)
        return directory is not None and directory.has_usual and not directory.has_attributes

    def no_attributes_until(self, prefix: str) -> float:
        """Last-Modified (ns) up to which objects are assumed to lack attributes; -inf: never."""
        directory = self._directories.get(prefix)
        if directory is None or directory.has_attributes or directory.without < self._enough():
            return -math.inf
        if self._assumes_nothing or prefix in self._changed:
            return -math.inf
        return directory.youngest_ns + SAME_TIME_NS

    def observe(
        self, prefix: str, modified_ns: int, *, has_attributes: bool, has_usual: bool = False
    ) -> None:
        """Note whether a HEAD found attributes, or (`has_usual`) only the mount's defaults."""
        directory = _entry(self._directories, prefix)
        if has_attributes:
            directory.has_attributes = True
            self._without_in_a_row = 0
            if prefix:
                self._beside(prefix).has_attributes = True
            return
        directory.has_usual |= has_usual
        directory.without += 1
        directory.youngest_ns = max(directory.youngest_ns, modified_ns)
        self._without_in_a_row += 1

    def sampled(self, prefix: str, asked: int, modified_ns: Sequence[int]) -> bool:
        """After `asked` HEADs, assume files of these times to lack attributes; False if one has."""
        directory = _entry(self._directories, prefix)
        if directory.has_attributes:
            return False
        self._decide(directory, modified_ns)
        if prefix and modified_ns and not directory.has_usual:
            alike = self._beside(prefix)
            alike.without += asked
            alike.oldest_ns = min(alike.oldest_ns, *modified_ns)
            alike.youngest_ns = max(alike.youngest_ns, *modified_ns)
        return True

    def is_like_others(self, prefix: str, modified_ns: Sequence[int]) -> bool:
        """True if sibling directories' files of such times lack attributes; then assume it here."""
        alike = self._alike.get(parent_of(prefix)) if prefix and modified_ns else None
        if alike is None or alike.has_attributes or alike.without < self.sample_size:
            return False
        if (
            min(modified_ns) < alike.oldest_ns - SAME_TIME_NS
            or max(modified_ns) > alike.youngest_ns + SAME_TIME_NS
        ):
            return False
        self._decide(_entry(self._directories, prefix), modified_ns)
        return True

    def is_undecided(self, prefix: str) -> bool:
        """True if HEADs of a few objects could save those of a directory's other objects."""
        directory = self._directories.get(prefix)
        if self._assumes_nothing or prefix in self._changed:
            return False
        return directory is None or not (
            directory.has_attributes or directory.without >= self._enough()
        )

    def is_new(self, prefix: str) -> bool:
        """True if nothing is known about a directory's objects."""
        return prefix not in self._directories

    @property
    def sample_size(self) -> int:
        """The number of HEADs that decide for a directory's other objects."""
        return READ_ONLY_SAMPLE if self.asks_less else self._enough()

    def _enough(self) -> int:
        return 1 if self._without_in_a_row >= EXPERIENCE else SAMPLE

    def _decide(self, directory: _Directory, modified_ns: Sequence[int]) -> None:
        directory.without = max(directory.without, SAMPLE)
        directory.youngest_ns = max((directory.youngest_ns, *modified_ns))

    def _beside(self, prefix: str) -> _Directory:
        return _entry(self._alike, parent_of(prefix))

    def moved(self, old: str, new: str) -> None:
        """Note that a directory was renamed, with everything below it."""
        for prefix in [known for known in self._directories if known.startswith((old, new))]:
            del self._directories[prefix]
        self._beside(new).has_attributes = True  # the renamed objects may have some
        for prefix in [known for known in self._changed if known.startswith(old)]:
            self.changed(new + prefix[len(old) :])

    def changed(self, prefix: str) -> None:
        """Note, and record, that this mount has changed an entry of a directory."""
        if prefix in self._changed or self._assumes_nothing:
            return
        self._changed.add(prefix)
        if len(self._changed) > MOST_CHANGED:
            self._assumes_nothing = True
            self._changed.clear()
        if self._record is not None:
            try:
                with self._record.open("a") as file:
                    file.write(json.dumps(prefix) + "\n")
            except OSError as error:
                logger.warning("%s can't be written: %s", self._record, error.strerror)
                self._record = None


def _entry(known: OrderedDict[str, _Directory], prefix: str) -> _Directory:
    directory = known.setdefault(prefix, _Directory())
    if len(known) > MOST_DIRECTORIES:
        known.popitem(last=False)
    return directory


def _read(record: Path) -> set[str]:
    try:
        lines = record.read_text().splitlines()
    except FileNotFoundError:
        return set()
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("%s can't be read: %s", record, error)
        return set()
    changed = set()
    for line in lines:
        try:
            changed.add(str(json.loads(line)))
        except ValueError:
            continue  # the last line of a killed process may be incomplete
    return changed
