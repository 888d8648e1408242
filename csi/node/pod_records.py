"""Which pod a target path belongs to, for the metrics: a file for each path, below /run.

Kubelet names the pod when it publishes, and again each minute, so that a record
that was lost comes back. Records are for people alone: no decision rests on them,
and one that can't be written is left out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger(__name__)

# Keys of kubelet's in a volume's context.
NAME = "csi.storage.k8s.io/pod.name"
NAMESPACE = "csi.storage.k8s.io/pod.namespace"


@dataclass(frozen=True, slots=True)
class PodRecord:
    """One pod that has a volume at `target`."""

    target: str
    namespace: str
    name: str


class PodRecords:
    """The records below `directory`. For any number of threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def note(self, target: Path, context: Mapping[str, str]) -> None:
        """Put the pod of a published path on record, if kubelet has named it."""
        name, namespace = context.get(NAME), context.get(NAMESPACE)
        if not name or not namespace:
            return
        record = PodRecord(os.fspath(target), namespace, name)
        path = self._path(target)
        if self._read(path) == record:
            return
        unfinished = path.with_suffix(".new")
        try:
            unfinished.write_text(json.dumps(asdict(record)))
            unfinished.replace(path)
        except OSError as error:
            log.warning("the metrics will not name the pod %s/%s: %s", namespace, name, error)

    def forget(self, target: Path) -> None:
        """The path is published no more."""
        with suppress(OSError):
            self._path(target).unlink(missing_ok=True)

    def all(self) -> dict[Path, PodRecord]:
        """All records, by their target paths."""
        found = (self._read(path) for path in self._directory.glob("*.json"))
        return {Path(record.target): record for record in found if record is not None}

    def _path(self, target: Path) -> Path:
        digest = hashlib.sha256(os.fsencode(target)).hexdigest()
        return self._directory / f"{digest[:32]}.json"

    def _read(self, path: Path) -> PodRecord | None:
        try:
            return PodRecord(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None
