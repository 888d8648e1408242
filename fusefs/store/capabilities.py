"""The conditions and checksums that a store honours, and the file that remembers them for a day.

A store may honour a condition, refuse it with an error, or ignore it, which no answer shows. So the
store is tested (probing.py), and the result is saved for each bucket and endpoint:

    DIRECTORY/capabilities-HASH.json    {"conditions": true, "checksums": true}

If the file is damaged or outdated, the store is tested again.
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

# Directory of the objects that the probes write: no mount lists it (posix/nodes/names.py).
PROBE_NAME = ".fusefs-probe"
# An upgraded or reconfigured store is noticed within a day.
KEPT_S = 24 * 3600.0
# Part of the file's name. Raised when the probes change, which invalidates older results.
FORMAT = 3


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a store: True, False, or None if unknown.

    `conditions`: the store honours conditions of PUTs (with `--conflict fail`: those of upload
    completions); `checksums`: the store compares the CRC32s of requests' bodies.
    """

    conditions: bool | None = None
    checksums: bool | None = None

    @property
    def is_known(self) -> bool:
        """True if all capabilities have been determined."""
        return {self.conditions, self.checksums} <= {True, False}

    @property
    def missing(self) -> list[str]:
        """Names of the capabilities that the store is known to lack."""
        return [name for name, value in asdict(self).items() if value is False]


def _path(directory: Path, identity: str) -> Path:
    hashed = hashlib.blake2b(f"{FORMAT} {identity}".encode(), digest_size=16).hexdigest()
    return directory / f"capabilities-{hashed}.json"


def load(directory: Path, identity: str) -> Capabilities | None:
    """Load the capabilities of the store `identity`; None if none were saved in a day. Blocks."""
    path = _path(directory, identity)
    try:
        age_s = time.time() - path.stat().st_mtime
        found = Capabilities(**json.loads(path.read_text()))
        return found if found.is_known and 0 <= age_s < KEPT_S else None
    except (OSError, ValueError, TypeError):
        return None


def save(directory: Path, identity: str, found: Capabilities) -> None:
    """Save the capabilities of the store `identity` atomically; only log disk errors. Blocks."""
    text = json.dumps(asdict(found))
    try:
        files.replace(_path(directory, identity), text, suffix=f".{os.getpid()}")
    except OSError as error:
        logger.info("the result of the store's test can't be saved: %s", error)
