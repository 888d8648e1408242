"""The record of attributes that the bucket does not have yet."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fusefs.posix.metadata import attribute_log
from fusefs.posix.metadata.attribute_log import AttributeLog, RecordedAttributes
from fusefs.store.interface import ObjectInfo
from tests.support.machine.disks import fill, small_disk


def test_a_record_keeps_the_tokens_of_its_requests(tmp_path: Path) -> None:
    record = RecordedAttributes(ObjectInfo("a", 3, '"etag"', 5), {"uid": "3"}, ("t-1", "t-2"))
    AttributeLog(tmp_path).put(record)
    assert attribute_log.load(tmp_path) == [record]


def recorded(key: str, uid: int) -> RecordedAttributes:
    return RecordedAttributes(ObjectInfo(key, 3, '"etag"', 5), {"uid": str(uid)})


def test_the_last_line_of_a_key_holds(tmp_path: Path) -> None:
    log = AttributeLog(tmp_path)
    for uid in range(3):
        log.put(recorded("a", uid))
        log.put(recorded("b", uid))
    log.done(["b"])
    assert attribute_log.load(tmp_path) == [recorded("a", 2)]
    log.rewrite([recorded("c", 1)])
    log.put(recorded("d", 1))
    assert attribute_log.load(tmp_path) == [recorded("c", 1), recorded("d", 1)]
    log.rewrite([])
    assert (tmp_path / attribute_log.NAME).read_bytes() == b""
    log.put(recorded("e", 1))
    assert attribute_log.load(tmp_path) == [recorded("e", 1)]


@pytest.mark.parametrize("torn", [b'["a", "e", 1', b"\0\0\0", b"7", b'["b", 1]', b"\xff"])
def test_a_line_that_was_torn_is_passed_over(tmp_path: Path, torn: bytes) -> None:
    log = AttributeLog(tmp_path)
    log.put(recorded("a", 1))
    with (tmp_path / attribute_log.NAME).open("ab") as file:
        file.write(torn + b"\n")
    log.put(recorded("c", 2))
    assert attribute_log.load(tmp_path) == [recorded("a", 1), recorded("c", 2)]


def test_a_line_that_a_full_disk_cuts_off_is_refused_and_spoils_no_other(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        log = AttributeLog(disk)
        log.put(recorded("a", 1))
        fill(disk)

        def put_many() -> None:
            for number in range(10_000):
                log.put(recorded(f"b{number:06}", number))

        with pytest.raises(OSError, match="No space") as refused:
            put_many()
        assert refused.value.errno == errno.ENOSPC
        whole = attribute_log.load(disk)
        assert (disk / attribute_log.NAME).read_bytes().endswith(b"\n")
        (disk / "filler").unlink()
        log.put(recorded("c", 2))
        assert attribute_log.load(disk) == [*whole, recorded("c", 2)]
        log.close(remove=True)
