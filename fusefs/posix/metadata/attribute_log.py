"""The log of changed attributes that the bucket does not have yet.

    STAGING/attributes       one line for each change (posix/journal/line_log.py)

The log is in the directory of the staged files, and like these it is found by the next
daemon, and by the next mount.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from fusefs.posix.journal.line_log import LineLog, line, load_lines
from fusefs.store.interface import ObjectInfo

logger = logging.getLogger("fusefs.attributes")

NAME = "attributes"


@dataclass(frozen=True, slots=True)
class RecordedAttributes:
    """The attributes that an object is to get: `info` is its version, `metadata` the new metadata.

    `tokens` are those of earlier requests for this, which may have made a new version already.
    """

    info: ObjectInfo
    metadata: dict[str, str]
    tokens: tuple[str, ...] = ()

    def line(self) -> bytes:
        info = self.info
        fields = [info.key, info.etag, info.size, info.mtime_ns, self.metadata, *self.tokens]
        return line(fields)


class AttributeLog(LineLog):
    """The attribute log of one mount."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / NAME)


def load(directory: Path) -> list[RecordedAttributes]:
    """Read the attribute log of a staging directory. Blocks."""
    records: list[RecordedAttributes] = []
    for key, fields in load_lines(directory / NAME).items():
        try:
            etag, size, mtime_ns, metadata, *tokens = fields
            info = ObjectInfo(key, size, etag, mtime_ns)
            records.append(RecordedAttributes(info, dict(metadata), tuple(map(str, tokens))))
        except (ValueError, TypeError):
            logger.warning("%s: what is on record of %s can't be read", directory / NAME, key)
    return records
