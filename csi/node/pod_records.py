"""The pod that has a volume at a target path, and its claim: for `fusefs-csi list`, for the
metrics, and for the bounds of inline volumes.

The scheduler counts PersistentVolumes, but no inline ones, of which the author of one pod
can write as many as there are mounts on a node. So a pod and a namespace may have some of
them on a node and no more.

A record is one file for each target path, below /run. Kubelet names the pod when it
publishes, and again each minute, so a record that was lost comes back. One that a killed
driver left goes once the pod's directory has gone.
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

# Keys of the volume's context that kubelet sets, and the provisioner through the controller.
POD_NAME = "csi.storage.k8s.io/pod.name"
POD_NAMESPACE = "csi.storage.k8s.io/pod.namespace"
CLAIM_NAME = "csi.storage.k8s.io/pvc/name"


@dataclass(frozen=True, slots=True)
class PodRecord:
    """One pod that has a volume at `target`; a text is "" where nothing names it."""

    target: str
    namespace: str
    name: str
    claim: str = ""
    is_inline: bool = False

    @classmethod
    def of(cls, target: Path, context: Mapping[str, str], *, is_inline: bool) -> PodRecord:
        """The record from the context of a publish call."""
        # An inline volume's author may write any key but kubelet's.
        claim = "" if is_inline else context.get(CLAIM_NAME, "")
        namespace, name = context.get(POD_NAMESPACE, ""), context.get(POD_NAME, "")
        return cls(os.fspath(target), namespace, name, claim, is_inline)

    @property
    def directory(self) -> Path:
        """The pod's: PODS/uid of PODS/uid/volumes/kubernetes.io~csi/VOLUME/mount."""
        parents = Path(self.target).parents
        return parents[min(3, len(parents) - 1)]


@dataclass(frozen=True, slots=True)
class InlineBounds:
    """The numbers of inline volumes that a pod, and a namespace's pods, may have on a node."""

    of_pod: int
    of_namespace: int


class PodRecords:
    """The records below `directory`, by target paths. For any number of threads."""

    def __init__(self, directory: Path) -> None:
        self._files = RecordFiles(directory, PodRecord)
        self._lock = threading.Lock()

    @contextmanager
    def publishing(self, record: PodRecord, bounds: InlineBounds) -> Iterator[None]:
        """Put a pod on record while the block publishes its volume, and keep that if it does.

        Raises:
            ResourceExhaustedError: its pod or its namespace has as many inline volumes
                on this node as it may have.
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
        """Put the pod of a published path on record."""
        name = _name(record.target)
        if self._files.read(name) == record:
            return
        try:
            self._files.write(name, record)
        except OSError as error:
            log.warning("the pod %s/%s is not listed: %s", record.namespace, record.name, error)

    def forget(self, target: Path) -> None:
        """The path is published no more."""
        with suppress(OSError):
            self._files.remove(_name(os.fspath(target)))

    def all(self) -> dict[Path, PodRecord]:
        """All records, by their target paths."""
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
        """The records of pods that are there; others are removed."""
        for target, record in self.all().items():
            if os.path.lexists(record.directory):
                yield record
            else:
                self.forget(target)


def _name(target: str) -> str:
    return hashlib.sha256(os.fsencode(target)).hexdigest()[:32]
