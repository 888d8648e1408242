"""The driver's records of its mounts, files below /run.

A record is written before its mount is made and removed after the last trace of the mount, so
everything that a killed call leaves behind belongs to a record. Records hold no secrets. A reboot
removes them together with the mounts.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from csi.errors import ResourceExhaustedError
from csi.node.record_files import RecordFiles
from fusefs.launch.control import ControlError
from fusefs.launch.mount_requests import daemon_request

ANSWER_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class MountRecord:
    """The record that the driver keeps of a mount: its name `key`, its mountpoint `root`.

    `arguments` is the part of its first publish request that must not change, as JSON; `settings`
    are its MountSettings as texts, `environment` has environment variables of its daemon.
    `drain_began` is the time (monotonic) of the first call to end it; 0 while pods use it.
    `variant` is a digest of request and settings: only equal ones share the mount.
    """

    key: str
    volume_id: str
    root: str
    source: str
    who: str
    uid: int
    arguments: str
    settings: dict[str, str]
    drain_timeout_s: float
    environment: dict[str, str] = field(default_factory=dict)
    drain_began: float = 0.0
    variant: str = ""

    @property
    def fs_group(self) -> int | None:
        """The fsGroup of the mount's first pod; pods of other groups get an idmapped bind mount."""
        group: int | None = json.loads(self.arguments)[1]
        return group

    @property
    def cache_directory(self) -> Path | None:
        """The cache directory in the mount's settings; None if the settings lack it."""
        try:
            # Building all settings of a hundred mounts would take a tenth of a second.
            return Path(self.settings["cache_dir"])
        except (KeyError, TypeError):
            return None

    def status(self) -> dict[str, Any] | None:
        """Return the status that the mount's daemon reports; None if it does not answer."""
        try:
            return daemon_request(Path(self.root), {"command": "status"}, ANSWER_TIMEOUT_S)
        except ControlError:
            return None


class MountRecords(RecordFiles[MountRecord]):
    """The records of mounts, by their keys. Callers serialise calls for the same volume."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, MountRecord)
        self._lock = threading.Lock()

    @contextmanager
    def one_more(self, most: int) -> Iterator[None]:
        """Lock the records for a block that adds one; ResourceExhaustedError at `most` records."""
        with self._lock:
            if len(self.names()) >= most:
                raise ResourceExhaustedError(
                    f"this node has {most} mounts, the maximum (--max-volumes). The scheduler"
                    " counts PersistentVolumes; inline volumes take a mount as well, and so does"
                    " each further identity of a volume, or its use without an fsGroup beside one"
                )
            yield

    def of_volume(self, volume_id: str) -> list[MountRecord]:
        """Return the records of all mounts of a volume, which may have several identities."""
        return [record for record in self.all() if record.volume_id == volume_id]

    def uids_of_domains(self) -> dict[str, int]:
        """Return all mounts' uids, by cache domain, or by "?" and mount key if it is unknown."""
        caches = ((record.cache_directory, record) for record in self.all())
        return {cache.name if cache else f"?{it.key}": it.uid for cache, it in caches}
