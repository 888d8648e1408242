"""Records of the pod and the claim at each target path.

`fusefs-csi list`, the metrics and the limits of inline volumes use the records.

The scheduler counts PersistentVolumes, but not inline volumes, and one pod could have as many
inline volumes as a node may have mounts. So their number on a node is limited for each pod and each
namespace.

Each target path has one record, a file below /run. Kubelet repeats its publish call, which names
the pod, each minute, so a lost record comes back. A record that a killed driver left is removed
when the pod's directory no longer exists.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from csi.errors import ResourceExhaustedError
from csi.node.record_files import RecordFiles

log = logging.getLogger(__name__)

# Keys of the volume's context: kubelet sets the first two, the provisioner sets the third.
POD_NAME = "csi.storage.k8s.io/pod.name"
POD_NAMESPACE = "csi.storage.k8s.io/pod.namespace"
CLAIM_NAME = "csi.storage.k8s.io/pvc/name"


@dataclass(frozen=True, slots=True)
class PodRecord:
    """The pod that has a volume at `target`; an unknown field is ""."""

    target: str
    namespace: str
    name: str
    claim: str = ""
    is_inline: bool = False

    @classmethod
    def of(cls, target: Path, context: Mapping[str, str], *, is_inline: bool) -> PodRecord:
        """Make the record from the context of a publish call."""
        # The author of an inline volume could write the provisioner's key, but not kubelet's.
        claim = "" if is_inline else context.get(CLAIM_NAME, "")
        namespace, name = context.get(POD_NAMESPACE, ""), context.get(POD_NAME, "")
        return cls(os.fspath(target), namespace, name, claim, is_inline)

    @property
    def directory(self) -> Path:
        """The pod's directory: PODS/UID if `target` is PODS/UID/volumes/DRIVER/VOLUME/mount."""
        parents = Path(self.target).parents
        return parents[min(3, len(parents) - 1)]


@dataclass(frozen=True, slots=True)
class InlineBounds:
    """The maximum numbers of inline volumes on a node, for one pod and for one namespace."""

    of_pod: int
    of_namespace: int


class PodRecords:
    """The records of pods in `directory`, one for each target path. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._files = RecordFiles(directory, PodRecord)
        self._lock = threading.Lock()

    @contextmanager
    def publishing(self, record: PodRecord, bounds: InlineBounds) -> Iterator[None]:
        """Write a pod's record; remove a new record again if the block, which publishes, fails.

        Raises:
            ResourceExhaustedError: the pod or its namespace already has the maximum number of
                inline volumes on this node.
        """
        with self._lock:
            is_new = self._files.read(_name(record.target)) is None
            if is_new and record.is_inline:
                self._check_bounds(record, bounds)
            self.note(record)
        try:
            yield
        except BaseException:
            if is_new:
                self.forget(Path(record.target))
            raise

    def note(self, record: PodRecord) -> None:
        """Write a record if it is new or has changed; an OSError is only logged."""
        name = _name(record.target)
        if self._files.read(name) == record:
            return
        try:
            self._files.write(name, record)
        except OSError as error:
            log.warning("the pod %s/%s is not listed: %s", record.namespace, record.name, error)

    def forget(self, target: Path) -> None:
        """Remove the record of a path that is no longer published, if there is one."""
        with suppress(OSError):
            self._files.remove(_name(os.fspath(target)))

    def all(self) -> dict[Path, PodRecord]:
        """Return all records, by their target paths."""
        return {Path(record.target): record for record in self._files.all()}

    def _check_bounds(self, record: PodRecord, bounds: InlineBounds) -> None:
        others = [each for each in self._existing() if each.is_inline]
        in_namespace = [each for each in others if each.namespace == record.namespace]
        of_pod = [each for each in in_namespace if each.name == record.name]
        for found, most, whose, flag in (
            (of_pod, bounds.of_pod, f"pod {record.name}", "pod"),
            (in_namespace, bounds.of_namespace, f"namespace {record.namespace}", "namespace"),
        ):
            if len(found) >= most:
                raise ResourceExhaustedError(
                    f"{whose} has {len(found)} inline volumes on this node, the maximum"
                    f" (--max-inline-per-{flag}); the scheduler does not count them"
                )

    def _existing(self) -> Iterator[PodRecord]:
        """Yield the records of pods that exist; remove all other records."""
        for target, record in self.all().items():
            if os.path.lexists(record.directory):
                yield record
            else:
                self.forget(target)


def _name(target: str) -> str:
    return hashlib.sha256(os.fsencode(target)).hexdigest()[:32]
