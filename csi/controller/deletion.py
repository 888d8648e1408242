"""Deletes a volume's data.

The data are deleted only if all of these conditions hold: the record asks for deletion, this
cluster made the volume, a segment of the prefix is the volume's own name, and no other volume's
prefix overlaps. The last condition is checked again before every batch, because volumes may be
created meanwhile. Otherwise the data are retained: the log gets one line, and the call succeeds.
After an interruption the next call deletes the remaining objects.
"""

from __future__ import annotations

import logging

from csi.controller.background import Progress
from csi.controller.bucket_client import Bucket
from csi.controller.volume_record import (
    VolumeRecord,
    VolumeRecordError,
    VolumeRecords,
    key_of,
    lost,
    read,
)
from csi.errors import AbortedError
from csi.volume.location import VolumeId, has_segment, new_volume_id, overlap

log = logging.getLogger(__name__)


def delete(
    bucket: Bucket, volume: VolumeId, cluster: str, records: VolumeRecords, progress: Progress
) -> None:
    """Delete a volume's data, unless they must be retained; then delete the volume's record.

    Raises:
        StoreError: a request failed; a repeated call deletes the remaining objects.
    """
    try:
        record = read(bucket, volume)
    except VolumeRecordError as error:
        log.warning("volume %s: retained: its record %s", volume, error)
        return
    if record is None:
        log.warning(
            "volume %s: nothing is deleted: %s; then its data are retained", volume, lost(volume)
        )
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
        log.info("volume %s: %s is deleted: %s", volume, where, progress.done)


def _why_retained(record: VolumeRecord, volume: VolumeId, cluster: str) -> str:
    """Return the reason for which the data must not be deleted; "" if there is no such reason."""
    if not record.deletes:
        return "its class says onDelete: retain"
    if not cluster:
        return "this driver has no cluster id"
    if new_volume_id(volume.store, volume.bucket, record.name) != volume:
        return "its record is that of another volume"
    if not has_segment(record.prefix, record.name):
        return "no segment of the prefix is the volume's name"
    return ""


def _delete_data(
    bucket: Bucket,
    volume: VolumeId,
    record: VolumeRecord,
    records: VolumeRecords,
    progress: Progress,
) -> str:
    """Delete all objects below the prefix; return "", or the reason why the deletion stopped."""
    # The prefix is listed again until it is empty, because a node may have uploaded meanwhile.
    is_empty, deleted = False, 0
    progress.done = "0 objects deleted so far"
    while not is_empty:
        is_empty = True
        for page in bucket.pages(record.prefix):
            is_empty = False
            why = _why_shared(bucket, volume, record, records)
            if why:
                return why
            bucket.delete_all([item.key for item in page])
            deleted += len(page)
            progress.done = f"{deleted:,} objects deleted so far"
    why = _why_shared(bucket, volume, record, records)
    if not why:
        bucket.abort_uploads(record.prefix)
    return why


def _why_shared(
    bucket: Bucket, volume: VolumeId, record: VolumeRecord, records: VolumeRecords
) -> str:
    """Describe another volume whose prefix may overlap, or ""; AbortedError if `record` is gone."""
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
