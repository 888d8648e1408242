"""What the controller keeps in memory of the records of volumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from csi.controller.bucket_client import ListedObject
from csi.controller.volume_record import FOLDER, VolumeRecord, VolumeRecords


class PlayedBucket:
    """A bucket with the records of volumes of these names; `on_get` comes before each answer."""

    url = "aws://bucket"

    def __init__(self, *names: str, on_get: Callable[[], object] = lambda: None) -> None:
        self.names = names
        self.read: list[str] = []
        self._on_get = on_get

    def pages(self, prefix: str) -> Iterator[list[ListedObject]]:
        for name in self.names:
            yield [ListedObject(f"{prefix}{name}", f'"{name}"')]

    def get(self, key: str) -> bytes:
        self._on_get()
        self.read.append(key)
        name = key.removeprefix(FOLDER)
        return VolumeRecord(name, f"{name}/", True, "cluster", 0, {}, "now").to_json()


def keys(
    records: VolumeRecords, *names: str, on_get: Callable[[], object] = lambda: None
) -> list[str]:
    bucket = PlayedBucket(*names, on_get=on_get)
    played: Any = bucket
    return [key.removeprefix(FOLDER) for key, _ in records.now(played)] + bucket.read


def test_records_of_deleted_volumes_are_forgotten() -> None:
    records = VolumeRecords()
    for number in range(3):
        name = f"volume-{number}"
        assert keys(records, name) == [name, FOLDER + name]
        assert keys(records, name) == [name]
    assert len(records._known) == 1


def test_a_record_is_listed_though_another_listing_was_made_before_it() -> None:
    records = VolumeRecords()
    found = keys(records, "one", "two", on_get=lambda: keys(records))
    assert found[:2] == ["one", "two"]
