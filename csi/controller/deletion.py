"""Deletes a volume's data, which may take longer than one call.

A thread does the work. A call waits for it until shortly before its deadline and is
then answered ABORTED with the progress; the next call waits on. If the driver ends,
the next call starts again with the remaining objects.

Data are deleted only if all of this is certain: the record asks for deletion, this
cluster made the volume, a segment of the prefix is the volume's own name, and no other
volume's prefix overlaps. The last condition is checked again before every batch, as
volumes are created meanwhile. Otherwise the data are retained: one line in the log,
and no error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from csi.controller.bucket_client import Bucket
from csi.controller.volume_record import (
    VolumeRecord,
    VolumeRecordError,
    VolumeRecords,
    key_of,
    read,
)
from csi.errors import AbortedError
from csi.volume.location import VolumeId, new_volume_id, overlap

# How long before a call's deadline it is answered.
MARGIN_S = 2.0
# How long a call without a deadline waits.
PATIENCE_S = 30.0

log = logging.getLogger(__name__)


class DeletionProgress:
    """How many objects a deletion has deleted."""

    def __init__(self) -> None:
        self.deleted = 0

    def __str__(self) -> str:
        return f"{self.deleted:,} objects deleted so far"


class Deletions:
    """The deletions that are under way. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, tuple[Future[None], DeletionProgress]] = {}

    def is_running(self, volume: VolumeId) -> bool:
        with self._lock:
            return str(volume) in self._running

    def run(
        self, volume: VolumeId, work: Callable[[DeletionProgress], None], time_left_s: float | None
    ) -> None:
        """Start `work` for `volume`, or join the running one, and return when it is done.

        Raises:
            AbortedError: the work goes on, and `time_left_s` is nearly over.
            Exception: the error that `work` raised.
        """
        future, progress = self._start_or_join(volume, work)
        remaining_s = PATIENCE_S if time_left_s is None else time_left_s
        try:
            future.result(timeout=max(remaining_s - MARGIN_S, remaining_s / 2))
        except TimeoutError:
            if future.done():
                raise
            raise AbortedError(f"deleting volume {volume}: {progress}") from None

    def _start_or_join(
        self, volume: VolumeId, work: Callable[[DeletionProgress], None]
    ) -> tuple[Future[None], DeletionProgress]:
        with self._lock:
            if str(volume) in self._running:
                return self._running[str(volume)]
            future: Future[None] = Future()
            progress = DeletionProgress()
            self._running[str(volume)] = future, progress
        try:
            threading.Thread(
                target=self._do, args=(volume, work, future, progress), name="deletion", daemon=True
            ).start()
        except RuntimeError:  # the container has as many threads as it may have
            with self._lock:
                del self._running[str(volume)]
            raise
        return future, progress

    def _do(
        self,
        volume: VolumeId,
        work: Callable[[DeletionProgress], None],
        future: Future[None],
        progress: DeletionProgress,
    ) -> None:
        error: BaseException | None = None
        try:
            work(progress)
        except BaseException as raised:
            error = raised
        # Before the result is set, so that a later call starts a new deletion.
        with self._lock:
            del self._running[str(volume)]
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def delete(
    bucket: Bucket,
    volume: VolumeId,
    cluster: str,
    records: VolumeRecords,
    progress: DeletionProgress,
) -> None:
    """Delete a volume's data, unless they are retained, and then its record.

    Raises:
        StoreError: a request failed; another call deletes the remaining objects.
    """
    try:
        record = read(bucket, volume)
    except VolumeRecordError as error:
        log.warning("volume %s: retained: its record %s", volume, error)
        return
    if record is None:
        log.info("volume %s: there is no such volume", volume)
        return
    if record.cluster != cluster:
        log.warning("volume %s: retained with its record: another cluster made it", volume)
        return
    why = _why_retained(record, volume, cluster)
    if not why:
        why = _delete_data(bucket, volume, record, records, progress)
    bucket.delete(key_of(volume))
    where = f"s3://{volume.bucket}/{record.prefix}"
    if why:
        log.warning("volume %s: %s is retained: %s", volume, where, why)
    else:
        log.info("volume %s: %s is deleted, %d objects", volume, where, progress.deleted)


def _why_retained(record: VolumeRecord, volume: VolumeId, cluster: str) -> str:
    """Why the record itself forbids to delete the data; "" if it does not."""
    if not record.deletes:
        return "its class says onDelete: retain"
    if not cluster:
        return "this driver has no cluster id"
    if new_volume_id(volume.store, volume.bucket, record.name) != volume:
        return "its record is that of another volume"
    if not record.has_own_prefix:
        return "no segment of the prefix is the volume's name"
    return ""


def _delete_data(
    bucket: Bucket,
    volume: VolumeId,
    record: VolumeRecord,
    records: VolumeRecords,
    progress: DeletionProgress,
) -> str:
    """Delete all objects below the prefix; "" when done, else why the deletion stopped."""
    # Listed once more after the last object, as a node may have uploaded meanwhile.
    is_empty = False
    while not is_empty:
        is_empty = True
        for page in bucket.pages(record.prefix):
            is_empty = False
            why = _why_shared(bucket, volume, record, records)
            if why:
                return why
            bucket.delete_all([item.key for item in page])
            progress.deleted += len(page)
    why = _why_shared(bucket, volume, record, records)
    if not why:
        bucket.abort_uploads(record.prefix)
    return why


def _why_shared(
    bucket: Bucket, volume: VolumeId, record: VolumeRecord, records: VolumeRecords
) -> str:
    """The other volume whose data may overlap; "" if there is none."""
    own = None
    for key, other in records.now(bucket):
        if isinstance(other, VolumeRecordError):
            return f"another volume may have a part of it: {other}"
        if key == key_of(volume):
            own = other
        elif overlap(record.prefix, other.prefix):
            return f"the volume of {key} has {other.prefix!r}"
    if own != record:
        raise AbortedError(f"volume {volume}: another driver has deleted it")
    return ""
