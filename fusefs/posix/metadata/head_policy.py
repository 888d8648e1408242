"""Objects that are taken to say nothing about themselves, without being asked.

A listing tells no metadata, and a HEAD for each file costs as much as reading it. Most
buckets were filled by programs that keep none. So a directory whose first files say
nothing is presumed to hold more of the kind: SAMPLE of them, or one alone once
EXPERIENCE in a row, of whatever directories, said nothing.

What makes that safe enough: one object that says something ends it for its directory;
an object is asked all the same if it is younger than those that were (a data set is
uploaded at one time, and what others write beside it later is not of that kind); and a
directory in which this mount, or an earlier one with its cache, changed something is never
presumed of. Before anything is changed, its object is always asked.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import OrderedDict
from pathlib import Path

from fusefs.settings.types import ObjectAttributes

logger = logging.getLogger("fusefs.posix")

SAMPLE = 32
EXPERIENCE = 128
# How much younger an object may be than those that said nothing, in nanoseconds.
SAME_TIME_NS = 600 * 10**9
# Directories that something is known of, at about 200 bytes for each.
MOST_DIRECTORIES = 100_000
# With more of them on record, nothing is presumed.
MOST_CHANGED = 20_000


class _Directory:
    __slots__ = ("silent", "tells", "youngest_ns")

    def __init__(self) -> None:
        self.silent = 0
        self.youngest_ns = 0
        self.tells = False


class Presumption:
    """What is presumed of one bucket. Belongs to the event loop.

    The directories that were changed are on `record`, a file of the cache that is read
    once, by the next mounts; without one they are known to this mount alone.
    """

    def __init__(
        self, mode: ObjectAttributes = ObjectAttributes.AUTO, record: Path | None = None
    ) -> None:
        self._mode = mode
        self._record = record
        self._directories: OrderedDict[str, _Directory] = OrderedDict()
        self._silent_in_a_row = 0
        self._changed = _read(record) if record is not None else set()
        if len(self._changed) > MOST_CHANGED:
            self._mode = ObjectAttributes.ALWAYS

    def is_silent(self, prefix: str, modified_ns: int) -> bool:
        """Whether an object of a directory is taken to say nothing.

        `modified_ns` is its Last-Modified, 0 for a marker, of which none is listed.
        """
        return modified_ns <= self.silent_until(prefix)

    def silent_until(self, prefix: str) -> float:
        """When the youngest object of a directory that is taken to say nothing was modified.

        In nanoseconds since the epoch; before any time if none is.
        """
        if self._mode != ObjectAttributes.AUTO:
            return math.inf if self._mode == ObjectAttributes.NEVER else -math.inf
        directory = self._directories.get(prefix)
        if directory is None or directory.tells or prefix in self._changed:
            return -math.inf
        if directory.silent < self._sample():
            return -math.inf
        return directory.youngest_ns + SAME_TIME_NS

    def heard(self, prefix: str, modified_ns: int, *, says: bool) -> None:
        """An object was asked; `says` whether it had anything to say."""
        directory = self._directories.setdefault(prefix, _Directory())
        if len(self._directories) > MOST_DIRECTORIES:
            self._directories.popitem(last=False)
        if says:
            directory.tells = True
            self._silent_in_a_row = 0
            return
        directory.silent += 1
        directory.youngest_ns = max(directory.youngest_ns, modified_ns)
        self._silent_in_a_row += 1

    def is_undecided(self, prefix: str) -> bool:
        """Whether asking a few more of a directory would spare asking the others."""
        directory = self._directories.get(prefix)
        if self._mode != ObjectAttributes.AUTO or prefix in self._changed:
            return False
        return directory is None or (not directory.tells and directory.silent < self._sample())

    def left(self, prefix: str) -> int:
        """How many objects of a directory are worth asking at once, for all that is known."""
        directory = self._directories.get(prefix)
        if self._mode != ObjectAttributes.AUTO or prefix in self._changed:
            return SAMPLE
        if directory is not None and directory.tells:
            return SAMPLE
        return max(0, self._sample() - (directory.silent if directory is not None else 0))

    def _sample(self) -> int:
        return 1 if self._silent_in_a_row >= EXPERIENCE else SAMPLE

    def moved(self, old: str, new: str) -> None:
        """A directory was renamed, with all that is below it."""
        for prefix in [one for one in self._directories if one.startswith((old, new))]:
            del self._directories[prefix]
        for prefix in [one for one in self._changed if one.startswith(old)]:
            self.changed(new + prefix[len(old) :])

    def changed(self, prefix: str) -> None:
        """This mount has written something into a directory."""
        if prefix in self._changed or self._mode != ObjectAttributes.AUTO:
            return
        self._changed.add(prefix)
        if self._record is not None:
            try:
                _append(self._record, prefix)
            except OSError as error:
                logger.warning("%s can't be written: %s", self._record, error.strerror)
                self._record = None


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
