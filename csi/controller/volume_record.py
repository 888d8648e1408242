"""The record of a volume: an object in the volume's bucket.

CreateVolume writes `.fusefs/volumes/<name>.json` first, and DeleteVolume removes it last. So every
volume has a record, and a repeated call whose caller never got an answer finds the state. A record
is written once, by a conditional PUT, and never changed. Mounts do not show the records.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from csi.controller.bucket_client import Bucket, OtherKeyError
from csi.errors import InvalidArgumentError
from csi.volume.location import VolumeId, normal_prefix
from fusefs.posix.nodes.names import PRIVATE
from fusefs.store.errors import NotFoundError
from fusefs.store.interface import ObjectVersion

FORMAT = 1
FOLDER = f"{PRIVATE}/volumes/"
READERS = 8


class VolumeRecordError(ValueError):
    """An object in the folder of the records is not a valid record."""


@dataclass(frozen=True, slots=True)
class VolumeRecord:
    """The record of one volume. `name` is from the request, `attributes` are the volume context.

    `cluster` is the id of the cluster that made the volume, or "". `made_at` distinguishes the
    volume from an earlier volume of the same name.
    """

    name: str
    prefix: str
    deletes: bool
    cluster: str
    capacity_bytes: int
    attributes: Mapping[str, str]
    made_at: str
    format: int = FORMAT

    def to_json(self) -> bytes:
        """Return the JSON text that the record's object contains."""
        return json.dumps(asdict(self), ensure_ascii=False, sort_keys=True).encode()

    @classmethod
    def from_json(cls, body: bytes) -> VolumeRecord:
        """Parse a record that `to_json` wrote; raises VolumeRecordError for anything else."""
        try:
            values = json.loads(body)
            if values["format"] != FORMAT:
                raise VolumeRecordError(f"has format {values['format']}")
            record = cls(**values)
            attributes = record.attributes
            is_sound = (
                isinstance(record.name, str)
                and isinstance(record.prefix, str)
                and normal_prefix(record.prefix) == record.prefix
                and isinstance(record.deletes, bool)
                and isinstance(record.cluster, str)
                and isinstance(record.made_at, str)
                and isinstance(record.capacity_bytes, int)
                and isinstance(attributes, dict)
                and all(isinstance(value, str) for value in attributes.values())
            )
        except (ValueError, TypeError, KeyError, RecursionError, InvalidArgumentError) as error:
            raise VolumeRecordError(f"is not a volume's record: {error}") from error
        if not is_sound:
            raise VolumeRecordError("is not a volume's record")
        return record


def key_of(volume: VolumeId) -> str:
    """Return the key of a volume's record in the volume's bucket."""
    return f"{FOLDER}{volume.name}.json"


def lost(volume: VolumeId) -> str:
    """Return a sentence with the possible reasons why the bucket has no record of a volume."""
    return (
        f"there is no record s3://{volume.bucket}/{key_of(volume)}: the volume is static or was"
        " deleted before; or somebody, or a lifecycle rule of the bucket, has removed the record"
    )


def read(bucket: Bucket, volume: VolumeId) -> VolumeRecord | None:
    """Read a volume's record; None if there is none, VolumeRecordError if it is not valid."""
    try:
        return VolumeRecord.from_json(bucket.get(key_of(volume)))
    except NotFoundError:
        return None


class VolumeRecords:
    """A reader of all records in a bucket, with a cache. Any thread may use it.

    Records never change, so the cache keeps each record until its object is gone.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ObjectVersion], VolumeRecord] = {}
        # A lock by bucket URL: a second thread finds the records that the first thread has read.
        self._reading: dict[str, threading.Lock] = {}

    def now(self, bucket: Bucket) -> Iterator[tuple[str, VolumeRecord | VolumeRecordError]]:
        """Yield the key of each record in the bucket, with the record or the error of reading it.

        Raises:
            StoreError: a request failed.
        """
        present: set[ObjectVersion] = set()
        for page in bucket.pages(FOLDER):
            present.update(page)
            with self._reading.setdefault(bucket.url, threading.Lock()):
                found = self._read_page(bucket, page)
            for item, record in found:
                yield item.key, record
        for url, item in list(self._known):
            if url == bucket.url and item not in present:  # its volume was deleted
                self._known.pop((url, item), None)

    def _read_page(
        self, bucket: Bucket, page: list[ObjectVersion]
    ) -> list[tuple[ObjectVersion, VolumeRecord | VolumeRecordError]]:
        """Return the records on a page of the listing. Records removed meanwhile are left out."""

        def read_one(item: ObjectVersion) -> bytes | VolumeRecordError | None:
            try:
                return bucket.get(item.key)
            except NotFoundError:
                return None
            except OtherKeyError as error:
                return VolumeRecordError(str(error))

        # Another thread with an older listing may drop from `_known` what this thread adds.
        known: dict[ObjectVersion, VolumeRecord | VolumeRecordError | None] = {
            item: self._known.get((bucket.url, item)) for item in page
        }
        unknown = [item for item, record in known.items() if record is None]
        with ThreadPoolExecutor(READERS) as readers:
            for item, body in zip(unknown, readers.map(read_one, unknown), strict=True):
                if body is None:
                    continue
                if isinstance(body, VolumeRecordError):
                    known[item] = body  # not in the cache: another Secret may have the key
                    continue
                try:
                    known[item] = self._known[bucket.url, item] = VolumeRecord.from_json(body)
                except VolumeRecordError as error:
                    known[item] = VolumeRecordError(f"{item.key} {error}")
        return [(item, record) for item, record in known.items() if record is not None]
