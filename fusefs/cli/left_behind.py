"""Finds the written files on the local disk that an ended mount did not upload.

The daemon's user owns these files, but root may run the command: no link below the cache directory
is followed, and only the first bytes of a regular file are read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fusefs.linux.files import closing, opened_below

# The logs in a staging directory (metadata/deferred_attributes.py and others), as users see them.
_LOGS = {"attributes": "changed attributes", "removals": "removals"}


def find(staging: Path, errors: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `key`, `state` and `error` of each staged file or other change that the bucket lacks.

    `errors` are the failed uploads that the daemon reported. A file that was open in a program when
    the daemon was killed may have no key in its record; then `key` is the path of the staged file.
    For changed attributes, removals and renames `key` is a description.
    """
    why = {entry["key"]: entry["error"] for entry in errors}
    cache, state = Path(*staging.parts[:-4]), staging.parts[-4:-2]
    found = []
    # The daemon removes an empty directory.
    with suppress(FileNotFoundError), opened_below(cache, *staging.parts[-4:]) as directory:
        for name in sorted(os.listdir(directory)):
            key = None
            if name.isdecimal():
                key = _pending_key(directory, name, staging)
            elif name in _LOGS and os.stat(name, dir_fd=directory, follow_symlinks=False).st_size:
                key = _LOGS[name]
            if key is not None:
                found.append({"key": key, "state": "not uploaded", "error": why.get(key)})
    # Records of unfinished renames are beside the staging directories.
    with suppress(OSError), opened_below(cache, *state, "renames") as directory:
        if any(name.endswith(".json") for name in os.listdir(directory)):
            found.append({"key": "renames of directories", "state": "not finished", "error": None})
    return found


def _pending_key(directory: int, name: str, staging: Path) -> str | None:
    """Return the key in a staged file's record, else its path; None if no upload of it is due."""
    from fusefs.posix.write import staging_record  # slow, and rarely needed

    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(Exception), closing(os.open(name, flags, dir_fd=directory)) as fd:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        # Anything may be in the record, such as JSON that is too deep for the parser.
        record = staging_record.read(fd, f"/proc/self/fd/{directory}/{name}")
        if record is None or record["is_unlinked"]:
            return None
        if staging_record.is_uploaded(record, status) and not record["is_meta_dirty"]:
            return None
        return str(record["key"] or staging / name)
    return None
