"""What one store honours of the conditions and checksums that changes rely on.

S3 stores differ: a condition may be honoured, refused with an error, or
ignored, which no answer tells. So it is tried (probing.py), and what was found
is kept on the disk for a day, for each bucket and endpoint:

    DIRECTORY/capabilities-HASH.json    {"identity": ..., "probed_ns": ..., "found": {...}}

A damaged or outdated file is as good as none: it is probed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fusefs.linux import files

logger = logging.getLogger("fusefs.store")

# In whose directory the probes are: no mount lists it (posix/nodes/names.py).
PROBE_NAME = ".fusefs-probe"
# A store may be upgraded or configured anew; a day later that is found.
KEPT_NS = 24 * 3600 * 1_000_000_000
# Raised when the probes change: what older ones have found does not count then.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store honours; None is what is not known.

    `..._if_match` and `..._if_none_match` are conditions about the object that
    a change replaces or deletes. `marker_...` are those of `dir/` markers.
    `delete_many_etags` are ETags in DeleteObjects. `checksums` says that the
    store compares `x-amz-checksum-crc32` with the body; `marker_metadata` that
    it keeps the metadata of markers.
    """

    put_if_match: bool | None = None
    put_if_none_match: bool | None = None
    complete_if_match: bool | None = None
    complete_if_none_match: bool | None = None
    copy_if_match: bool | None = None
    copy_if_none_match: bool | None = None
    delete_if_match: bool | None = None
    delete_many_etags: bool | None = None
    marker_if_match: bool | None = None
    marker_if_none_match: bool | None = None
    marker_delete_if_match: bool | None = None
    marker_metadata: bool | None = None
    checksums: bool | None = None

    @property
    def is_known(self) -> bool:
        """Whether the probes have found out everything."""
        return None not in asdict(self).values()

    @property
    def missing(self) -> list[str]:
        """What the store is known not to honour, by name."""
        return [name for name, value in asdict(self).items() if value is False]

    @property
    def lacking_for_strict(self) -> list[str]:
        """What `--conflict fail` needs and the store is known not to honour, by name."""
        return [name for name in self.missing if name.startswith(("put_", "complete_"))]


_NAMES = frozenset(field.name for field in fields(Capabilities))
# What people read in their place.
SHOWN = {
    "put_if_match": "If-Match of PUT",
    "put_if_none_match": "If-None-Match of PUT",
    "complete_if_match": "If-Match of CompleteMultipartUpload",
    "complete_if_none_match": "If-None-Match of CompleteMultipartUpload",
    "copy_if_match": "If-Match of CopyObject",
    "copy_if_none_match": "If-None-Match of CopyObject",
    "delete_if_match": "If-Match of DELETE",
    "delete_many_etags": "ETags in DeleteObjects",
    "marker_if_match": "If-Match of directory markers",
    "marker_if_none_match": "If-None-Match of directory markers",
    "marker_delete_if_match": "If-Match of deleted directory markers",
    "marker_metadata": "metadata of directory markers",
    "checksums": "checksums",
}
# Conditions on content are not among these: what it means where a store lacks one.
MINOR = {
    "marker_metadata": "modes and times of directories last as long as the mount",
    "checksums": "what is sent has its MD5 as well",
}
ALL = Capabilities(**dict.fromkeys(_NAMES, True))
# What is assumed where the user answers for the store's conditions.
ASSUMED = replace(ALL, marker_metadata=None, checksums=None)


def _path(directory: Path, identity: str) -> Path:
    hashed = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    return directory / f"capabilities-{hashed}.json"


def load(directory: Path, identity: str) -> Capabilities | None:
    """What was found of a bucket in the last day; None if nothing was. Blocks."""
    try:
        record = json.loads(_path(directory, identity).read_text())
        age_ns = time.time_ns() - int(record["probed_ns"])
        is_valid = (record["format"], record["identity"]) == (FORMAT, identity)
        if not is_valid or not 0 <= age_ns < KEPT_NS:
            return None
        found: dict[str, Any] = record["found"]
        if found.keys() - _NAMES or not all(value in (True, False) for value in found.values()):
            return None
        return Capabilities(**found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.info("what the store honours is probed again: %s", error)
        return None


def save(directory: Path, identity: str, found: Capabilities) -> None:
    """Keep what was found for a day, whole or not at all. Blocks.

    Where the disk does not take it, the next mount probes again.
    """
    known = {name: value for name, value in asdict(found).items() if value is not None}
    text = json.dumps(
        {"format": FORMAT, "identity": identity, "probed_ns": time.time_ns(), "found": known}
    )
    path = _path(directory, identity)
    try:
        files.replace(path, text, suffix=f".{os.getpid()}")
    except OSError as error:
        logger.info("what the store honours is not kept: %s", error)
