"""The driver's records of its mounts, below /run.

A record is written before its mount is made and removed after the last trace of it,
so everything that a killed call leaves behind belongs to a record. Records hold no
secrets. A reboot removes them together with the mounts.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from csi.errors import ResourceExhaustedError
from csi.node.record_files import known_fields
from fusefs.api import replace_file


@dataclass(frozen=True, slots=True)
class MountRecord:
    """One mount: `key` names it, `root` is where it is.

    `arguments` stand for what it was published with but for what may change;
    `settings` is the JSON of its MountSettings, `environment` its daemon's.
    """

    key: str
    volume_id: str
    root: str
    source: str
    who: str
    uid: int
    arguments: str
    settings: str
    drain_timeout_s: float
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def domain(self) -> str:
        """The name of the cache domain (identities/cache_domains.py); "" if it cannot be read."""
        try:
            # Only this one: to build the settings of a hundred mounts takes a tenth of a second.
            return Path(json.loads(self.settings)["cache_dir"]).name
        except (ValueError, KeyError, TypeError):
            return ""


class MountRecords:
    """The records below `directory`, one file each. One call at a time for each volume."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextmanager
    def one_more(self, most: int) -> Iterator[None]:
        """Let no other thread add a record while the block adds one.

        Raises:
            ResourceExhaustedError: there are `most` records already.
        """
        with self._lock:
            if len(self._names()) >= most:
                raise ResourceExhaustedError(
                    f"this node has {most} mounts, the maximum (--max-volumes). The scheduler"
                    " counts PersistentVolumes; inline volumes, and each further identity or"
                    " fsGroup of a volume, take a mount as well"
                )
            yield

    def write(self, record: MountRecord) -> None:
        """Write a record, whole or not at all."""
        replace_file(self._path(record.key), json.dumps(asdict(record)))

    def read(self, key: str) -> MountRecord | None:
        """The record of a mount; None if there is none that can be read."""
        try:
            return MountRecord(**known_fields(MountRecord, self._path(key)))
        except (OSError, ValueError, TypeError):
            return None

    def all(self) -> list[MountRecord]:
        found = (self.read(name.removesuffix(".json")) for name in sorted(self._names()))
        return [record for record in found if record is not None]

    def of_volume(self, volume_id: str) -> list[MountRecord]:
        """The records of a volume's mounts, one for each identity."""
        return [record for record in self.all() if record.volume_id == volume_id]

    def uids_of_domains(self) -> dict[str, int]:
        """The users of all mounts, by the names of their cache domains, or else by key."""
        return {record.domain or record.key: record.uid for record in self.all()}

    def remove(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def _names(self) -> list[str]:
        return [name for name in os.listdir(self._directory) if name.endswith(".json")]

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.json"
