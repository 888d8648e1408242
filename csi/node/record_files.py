"""The driver's records, each in a JSON file, which a newer version of the driver may have written.

After a roll-back the older driver finds the newer driver's records. It ignores only the fields that
it does not know: if it ignored the whole record, a running pod would lose its mount.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from fusefs.linux.files import replace as replace_file

R = TypeVar("R")


class RecordFiles(Generic[R]):
    """The records in `directory`, of the dataclass `kind`. Any thread may use them."""

    def __init__(self, directory: Path, kind: type[R]) -> None:
        self._directory = directory
        self._kind: Any = kind
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """Return the names of all records, sorted."""
        found = (name for name in os.listdir(self._directory) if name.endswith(".json"))
        return sorted(name.removesuffix(".json") for name in found)

    def read(self, name: str) -> R | None:
        """Return a record; None if it is missing or cannot be read."""
        try:
            found = dict(json.loads(self._path(name).read_text()))
            known = {field.name for field in fields(self._kind)}
            record: R = self._kind(**{key: found[key] for key in found.keys() & known})
        except (OSError, ValueError, TypeError):
            return None
        return record

    def all(self) -> list[R]:
        """Return all records that can be read."""
        found = (self.read(name) for name in self.names())
        return [record for record in found if record is not None]

    def write(self, name: str, record: R) -> None:
        """Write a record atomically, in place of an earlier one; may raise OSError."""
        written: Any = record
        replace_file(self._path(name), json.dumps(asdict(written)))

    def remove(self, name: str) -> None:
        """Remove a record, if it exists."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.json"
