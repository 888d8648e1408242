"""Decides which objects need no HEAD.

Listings carry no user metadata, and a HEAD for each file costs as much as reading it.
Most buckets were filled by programs that keep none. If the first SAMPLE objects of a
directory have no attributes, the others of the same age are assumed to have none; one
object is enough once EXPERIENCE objects in a row, of any directories, had none.

What makes that safe enough: one object with attributes ends it for its directory; an
object that is younger than those of the sample has its HEAD (a data set is uploaded at
one time, and what is written beside it later is of another kind); and nothing is assumed
of a directory in which this mount, or an earlier one with its cache, changed something.
Before anything is changed, its object always has its HEAD.

A read-only mount is for data sets of many files, so it asks less. Where nothing is known only
an object that may be a symbolic link by its size has its HEAD. One object without attributes
decides for its directory, and ALIKE directories in a row without any for all others of the
same parent. Attributes that are what the mount shows anyway, times aside, count as none, but
then it takes a sample to decide. What was assumed wrongly shows when the object is read, or
when a program may not do what it wants to (head_cache.py).
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("fusefs.posix")

SAMPLE = 32
EXPERIENCE = 128
# Directories of one parent whose files have no attributes: then those of the others have none.
ALIKE = 4
# How much younger an object may be than those without attributes, in nanoseconds.
SAME_TIME_NS = 600 * 10**9
# Directories that are remembered, at about 200 bytes for each.
MOST_DIRECTORIES = 100_000
# With more of them on record, nothing is assumed.
MOST_CHANGED = 20_000


class _Directory:
    __slots__ = ("has_attributes", "has_usual", "without", "youngest_ns")

    def __init__(self) -> None:
        self.without = 0
        self.youngest_ns = 0
        self.has_attributes = False
        # An object has attributes which the mount shows anyway.
        self.has_usual = False


class Assumed(NamedTuple):
    """Up to which Last-Modified the objects of a directory are assumed to have no attributes.

    In ns since the epoch: for what may be a symbolic link, and for all else.
    """

    links: float
    others: float


class HeadPolicy:
    """What is assumed of the objects of one bucket. Belongs to the event loop.

    The directories that were changed are on `record`, a file of the cache that is read
    once, by the next mounts; without one they are known to this mount alone.
    """

    def __init__(self, record: Path | None = None, *, is_read_only: bool = False) -> None:
        # See the module's text.
        self.asks_less = is_read_only
        # Of a read-only mount: what is known of the directories of one parent together.
        self._alike: OrderedDict[str, _Directory] = OrderedDict()
        self._record = record
        self._directories: OrderedDict[str, _Directory] = OrderedDict()
        self._without_in_a_row = 0
        self._changed = _read(record) if record is not None else set()
        # Nothing is assumed any more.
        self._assumes_nothing = len(self._changed) > MOST_CHANGED

    def has_no_attributes(self, prefix: str, modified_ns: int) -> bool:
        """Whether an object of a directory is assumed to have no attributes.

        `modified_ns` is its Last-Modified, 0 for a marker, of which none is listed.
        """
        return modified_ns <= self.no_attributes_until(prefix)

    def assumed(self, prefix: str) -> Assumed:
        """The assumptions about the objects of a directory."""
        until = self.no_attributes_until(prefix)
        directory = self._directories.get(prefix)
        says_something = directory is not None and (
            directory.has_attributes or (directory.has_usual and until < 0)
        )
        return Assumed(until, until if says_something or not self.asks_less else math.inf)

    def has_attributes(self, prefix: str) -> bool:
        """True if an object of a directory is known to have attributes."""
        directory = self._directories.get(prefix)
        return directory is not None and directory.has_attributes

    def no_attributes_until(self, prefix: str) -> float:
        """Up to which Last-Modified the objects of a directory are assumed to have no attributes.

        In nanoseconds since the epoch; minus infinity where each has its HEAD.
        """
        if self._assumes_nothing:
            return -math.inf
        directory = self._directories.get(prefix)
        if directory is None and self.asks_less:
            directory = self._of_others(prefix)
        if directory is None or directory.has_attributes or prefix in self._changed:
            return -math.inf
        if directory.without < self._sample():
            return -math.inf
        return directory.youngest_ns + SAME_TIME_NS

    def observe(
        self, prefix: str, modified_ns: int, *, has_attributes: bool, has_usual: bool = False
    ) -> None:
        """Take note of an object's HEAD, which had attributes or had none.

        `has_usual`: it had some that the mount shows anyway.
        """
        if self.asks_less and prefix not in self._directories and not has_usual:
            self._note_alike(prefix, modified_ns, has_attributes=has_attributes)
        directory = self._directories.setdefault(prefix, _Directory())
        if len(self._directories) > MOST_DIRECTORIES:
            self._directories.popitem(last=False)
        if has_attributes:
            directory.has_attributes = True
            self._without_in_a_row = 0
            return
        directory.has_usual |= has_usual
        directory.without += SAMPLE if self.asks_less and not has_usual else 1
        directory.youngest_ns = max(directory.youngest_ns, modified_ns)
        self._without_in_a_row += 1

    def is_new(self, prefix: str) -> bool:
        """True if nothing is known of a directory's objects."""
        return prefix not in self._directories and self.is_undecided(prefix)

    def is_undecided(self, prefix: str) -> bool:
        """Whether a few more HEADs in a directory could spare those of the others."""
        directory = self._directories.get(prefix)
        if self._assumes_nothing or prefix in self._changed:
            return False
        if directory is None and self._of_others(prefix) is not None:
            return False
        return directory is None or (
            not directory.has_attributes and directory.without < self._sample()
        )

    def remaining(self, prefix: str) -> int:
        """How many HEADs are worth sending at once in a directory."""
        directory = self._directories.get(prefix)
        if self._assumes_nothing or prefix in self._changed:
            return SAMPLE
        if directory is not None and directory.has_attributes:
            return SAMPLE
        return max(0, self._sample() - (directory.without if directory is not None else 0))

    def _sample(self) -> int:
        return 1 if self._without_in_a_row >= EXPERIENCE else SAMPLE

    def _note_alike(self, prefix: str, modified_ns: int, *, has_attributes: bool) -> None:
        """Take note of the first object of a directory."""
        alike = self._alike.setdefault(_parent(prefix), _Directory())
        if len(self._alike) > MOST_DIRECTORIES:
            self._alike.popitem(last=False)
        alike.without = 0 if has_attributes else alike.without + SAMPLE
        alike.youngest_ns = max(alike.youngest_ns, modified_ns)

    def _of_others(self, prefix: str) -> _Directory | None:
        """The knowledge of the other directories of a parent, None if it is too little."""
        alike = self._alike.get(_parent(prefix))
        return alike if alike is not None and alike.without >= ALIKE * SAMPLE else None

    def moved(self, old: str, new: str) -> None:
        """A directory was renamed, with all that is below it."""
        for prefix in [known for known in self._directories if known.startswith((old, new))]:
            del self._directories[prefix]
        for prefix in [known for known in self._changed if known.startswith(old)]:
            self.changed(new + prefix[len(old) :])

    def changed(self, prefix: str) -> None:
        """This mount has written something into a directory."""
        if prefix in self._changed or self._assumes_nothing:
            return
        self._changed.add(prefix)
        if len(self._changed) > MOST_CHANGED:
            self._assumes_nothing = True
            self._changed.clear()
        if self._record is not None:
            try:
                _append(self._record, prefix)
            except OSError as error:
                logger.warning("%s can't be written: %s", self._record, error.strerror)
                self._record = None


def _parent(prefix: str) -> str:
    return prefix[: prefix.rstrip("/").rfind("/") + 1]


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
            continue  # cut off by the end of a process
    return changed


def _append(record: Path, prefix: str) -> None:
    fd = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, (json.dumps(prefix) + "\n").encode())
    finally:
        os.close(fd)
