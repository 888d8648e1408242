"""The conditions and checksums that one store honours, of those that changes rely on.

A condition may be honoured, refused with an error, or ignored, which no answer tells. So it is
tried (probing.py), and what was found is kept for a day, for each bucket and endpoint:

    DIRECTORY/capabilities-HASH.json    {"conditions": true, "checksums": true}

A damaged or outdated file is as good as none: it is probed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from fusefs.linux import files

logger = logging.getLogger("fusefs.store")

# In whose directory the probes are: no mount lists it (posix/nodes/names.py).
PROBE_NAME = ".fusefs-probe"
# A store may be upgraded or configured anew; a day later that is found.
KEPT_S = 24 * 3600.0
# A part of the file's name. Raised when the probes change: what older ones have found does not
# count then.
FORMAT = 3


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a store: True, False, or None for what is not known.

    `conditions` of the object that a PUT replaces; `checksums` (`x-amz-checksum-crc32`) of bodies.
    """

    conditions: bool | None = None
    checksums: bool | None = None

    @property
    def is_known(self) -> bool:
        """True if the probes have found out everything."""
        return {self.conditions, self.checksums} <= {True, False}

    @property
    def missing(self) -> list[str]:
        """The names of what the store is known not to honour."""
        return [name for name, value in asdict(self).items() if value is False]


def _path(directory: Path, identity: str) -> Path:
    hashed = hashlib.blake2b(f"{FORMAT} {identity}".encode(), digest_size=16).hexdigest()
    return directory / f"capabilities-{hashed}.json"


def load(directory: Path, identity: str) -> Capabilities | None:
    """The findings about a bucket of the last day; None if there are none. Blocks."""
    path = _path(directory, identity)
    try:
        age_s = time.time() - path.stat().st_mtime
        found = Capabilities(**json.loads(path.read_text()))
        return found if found.is_known and 0 <= age_s < KEPT_S else None
    except (OSError, ValueError, TypeError):
        return None


def save(directory: Path, identity: str, found: Capabilities) -> None:
    """Keep what was found for a day, whole or not at all. Blocks.

    Where the disk does not take it, the next mount probes again.
    """
    text = json.dumps(asdict(found))
    try:
        files.replace(_path(directory, identity), text, suffix=f".{os.getpid()}")
    except OSError as error:
        logger.info("the result of the store's test can't be saved: %s", error)
