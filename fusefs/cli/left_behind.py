"""Finds the written files on the local disk that an ended mount did not upload.

The daemon's user owns these files, but root may run the command: each file is opened without
following links, and only the first bytes of a regular file are read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# The logs in a staging directory (metadata/deferred_attributes.py and others), as users see them.
_LOGS = {"attributes": "changed attributes", "removals": "removals"}


def find(staging: Path, errors: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `key`, `state` and `error` of each staged file or other change that the bucket lacks.

    `errors` are the failed uploads that the daemon reported. A file that was open in a program when
    the daemon was killed may have no key in its record; then `key` is the path of the staged file.
    For changed attributes, removals and renames `key` is a description.
    """
    why = {entry["key"]: entry["error"] for entry in errors}
    try:
        entries = sorted(os.scandir(staging), key=lambda entry: entry.name)
    except FileNotFoundError:  # the daemon removes an empty directory
        entries = []
    found = []
    for entry in entries:
        key = None
        if entry.name.isdecimal():
            key = _pending_key(entry.path)
        elif entry.name in _LOGS and entry.stat(follow_symlinks=False).st_size:
            key = _LOGS[entry.name]
        if key is not None:
            found.append({"key": key, "state": "not uploaded", "error": why.get(key)})
    # Records of unfinished renames are beside the staging directories.
    if any((staging.parents[1] / "renames").glob("*.json")):
        found.append({"key": "renames of directories", "state": "not finished", "error": None})
    return found


def _pending_key(path: str) -> str | None:
    """Return the key in a staged file's record, else `path`; None if no upload of it is due."""
    from fusefs.posix.write import staging_record  # slow, and rarely needed

    with suppress(OSError, ValueError, LookupError, TypeError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            record = staging_record.read(fd, path) if stat.S_ISREG(status.st_mode) else None
        finally:
            os.close(fd)
        if record is None or record["is_unlinked"]:
            return None
        if staging_record.is_uploaded(record, status) and not record["is_meta_dirty"]:
            return None
        return record["key"] or path
    return None
