"""Which cached files are never evicted: those at or below the paths of `fusefs pin`.

A pin names a key of a bucket, or the prefix before a slash, and so every version
of the objects there. The pins of all mounts that share a directory are in one file,
`pins.json`, which is replaced as a whole under a lock and so outlives the catalog.

Cached files are retained one by one: the catalog has a row with the key and the
name of each (`Catalog.retain`), because a mount's evictor knows of the other mounts'
files only the names. A file gets its row when a version of a pinned key is used or
fetched. The row of a newer version replaces it, so one version of each object is retained.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from fusefs.linux import files

logger = logging.getLogger("fusefs.cache")

RECORD = "pins.json"
LOCK = "pins.lock"

Pins = dict[str, list[str]]


def covers(pins: frozenset[str], key: str) -> bool:
    """Whether a key is one of the pins, or below one; "" pins everything."""
    if "" in pins or key in pins:
        return True
    at = key.rfind("/")
    while at >= 0:
        if key[:at] in pins:
            return True
        at = key.rfind("/", 0, at)
    return False


class Retention:
    """The pins of one bucket in one cache directory.

    `pins` are keys and prefixes without their last slash. `files` has the names of retained
    files, and perhaps of some that no longer are, with their keys; None for files of other
    buckets. All methods that read or
    change the record block.
    """

    def __init__(self, directory: Path, identity: str) -> None:
        """Read the record."""
        self.pins: frozenset[str] = frozenset()
        self.files: dict[str, str | None] = {}
        self.identity = identity
        self._directory = directory
        self._known: tuple[int, int] | None = None
        self.refresh()

    def covers(self, key: str) -> bool:
        """Whether the files of a key are retained."""
        return bool(self.pins) and covers(self.pins, key)

    def refresh(self) -> bool:
        """Read the record if it was replaced since, and return whether it was.

        What is known stays if it can't be read.
        """
        try:
            status = os.stat(self._directory / RECORD)
        except FileNotFoundError:
            was_known, self._known, self.pins = self._known is not None, None, frozenset()
            return was_known
        except OSError as error:
            logger.warning("the pins can't be read: %s", error)
            return False
        if (status.st_ino, status.st_mtime_ns) == self._known:
            return False
        self._known = (status.st_ino, status.st_mtime_ns)
        try:
            self.pins = frozenset(self._read().get(self.identity, ()))
        except OSError as error:
            logger.warning("the pins can't be read: %s", error)
        return True

    def add(self, pins: Iterable[str]) -> None:
        """Put pins on record; they are on the disk when this returns.

        Raises:
            OSError: the record can't be written.
        """
        self._change(lambda known: known.union(pins))

    def remove(self, pins: Iterable[str]) -> None:
        """Take pins off the record.

        Raises:
            OSError: the record can't be written.
        """
        self._change(lambda known: known.difference(pins))

    def _change(self, change: Callable[[frozenset[str]], frozenset[str]]) -> None:
        fd = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            record = self._read()
            before = frozenset(record.get(self.identity, ()))
            after = change(before)
            if after != before:
                record[self.identity] = sorted(after)
                kept = {name: pins for name, pins in record.items() if pins}
                files.replace(self._directory / RECORD, json.dumps(kept), is_durable=True)
            self.pins = after
        finally:
            os.close(fd)

    def _read(self) -> Pins:
        try:
            content = json.loads((self._directory / RECORD).read_bytes())
            return {str(name): [str(pin) for pin in pins] for name, pins in content.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError):
            raise OSError(
                f"{self._directory / RECORD} is damaged: remove it, and pin again"
            ) from None
