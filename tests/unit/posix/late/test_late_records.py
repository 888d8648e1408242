"""Records of requests that may be executed late: by each process, and by the next mount."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from fusefs.posix.late.request_log import (
    COPY,
    DELETE,
    PUT,
    SLOT,
    SLOTS,
    Change,
    RequestLog,
    unanswered_in,
)
from fusefs.posix.late.uncertain_keys import (
    ABSENT,
    KILLED_WAIT_S,
    UncertainKey,
    UncertainKeys,
    boottime,
)
from fusefs.store.interface import ObjectInfo
from tests.support.survival.mortal_mount import DiedError, MortalMount, close_all, die

SOURCE = "aws/bucket"


def requests_in(directory: Path) -> UncertainKeys:
    directory.parent.mkdir(exist_ok=True)
    return UncertainKeys(directory, SOURCE, (3600.0,))


def left_by_a_mount(directory: Path) -> None:
    """A key with a request without an answer, and the content that is expected under it."""
    late = requests_in(directory)
    entry = late.note_unanswered(Change(PUT, "key", ("1.1",)))
    path = late.content_path(entry)
    path.write_bytes(b"expected")
    late.expect(entry, ObjectInfo("key", 8, '"etag"', 5), path.name)
    late.close(remove=False)


def taken_over(directory: Path) -> tuple[UncertainKey, bytes | None]:
    late = requests_in(directory)
    (entry,) = late
    content = None if entry.content is None else (directory / entry.content).read_bytes()
    late.close(remove=False)
    return entry, content


def test_the_next_mount_has_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    left_by_a_mount(tmp_path / "late" / "1")
    entry, content = taken_over(tmp_path / "late" / "2")
    assert (entry.key, content) == ("key", b"expected")
    assert [one.change.tokens for one in entry.unanswered] == [("1.1",)]
    assert [path.name for path in (tmp_path / "late").iterdir()] == ["2"]
    (record,) = tmp_path.glob("late/2/*.json")
    st_ino = record.stat().st_ino
    taken_over(tmp_path / "late" / "2")
    assert record.stat().st_ino == st_ino, "what has not changed is not written again"
    (path,) = tmp_path.glob("late/2/1.1*")
    path.unlink()  # a content that is gone ends no mount
    entry, content = taken_over(tmp_path / "late" / "3")
    assert (entry.key, content) == ("key", None)
    assert isinstance(entry.expected, ObjectInfo)


@pytest.mark.parametrize("next_one", ["2", "3"])
def test_a_process_that_was_killed_while_it_took_over_loses_nothing(
    tmp_path: Path, next_one: str
) -> None:
    """It had the record and the content, and had removed nothing of the other mount's."""
    old = tmp_path / "late" / "1"
    left_by_a_mount(old)
    shutil.copytree(old, tmp_path / "kept")
    taken_over(tmp_path / "late" / "2")
    for path in (tmp_path / "kept").iterdir():
        if path.suffix or path.name in ("source", "requests"):
            old.mkdir(exist_ok=True)
            shutil.copy(path, old)
    content = next(path for path in old.iterdir() if path.name.startswith("1.1"))
    content.unlink()
    entry, expected = taken_over(tmp_path / "late" / next_one)
    assert (entry.key, expected) == ("key", b"expected")


@pytest.mark.parametrize("next_one", ["2", "3"])
def test_a_process_that_is_killed_before_it_has_the_record_leaves_the_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_one: str
) -> None:
    left_by_a_mount(tmp_path / "late" / "1")
    with monkeypatch.context() as patch:
        patch.setattr(UncertainKeys, "record", die)
        with pytest.raises(DiedError):
            requests_in(tmp_path / "late" / "2")
    close_all(tmp_path)
    entry, content = taken_over(tmp_path / "late" / next_one)
    assert (entry.key, content) == ("key", b"expected")
    contents = [path for path in tmp_path.rglob("1.*") if path.suffix != ".json"]
    assert len(contents) == 1


@pytest.mark.parametrize("next_one", ["2", "3"])
def test_a_change_waits_as_long_where_a_second_process_is_killed(
    tmp_path: Path, next_one: str
) -> None:
    """For a request that was under way when the first one was killed."""
    first = requests_in(tmp_path / "late" / "1")
    first.log.begin(Change(PUT, "key", ("1.1",)))
    first.close(remove=False)
    before = boottime()
    second, _ = taken_over(tmp_path / "late" / "2")
    assert second.waits_until >= before + KILLED_WAIT_S
    third, _ = taken_over(tmp_path / "late" / next_one)
    assert third.waits_until == second.waits_until


@pytest.mark.parametrize("source", [b"", b"\xff\xfe"])
def test_a_damaged_source_ends_no_mount(tmp_path: Path, source: bytes) -> None:
    old = tmp_path / "late" / "1"
    left_by_a_mount(old)
    (old / "source").write_bytes(source)
    late = requests_in(tmp_path / "late" / "2")
    assert len(late) == 0
    late.close(remove=True)
    assert taken_over(old)[0].key == "key"


def test_a_disk_that_removes_nothing_ends_no_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by_a_mount(tmp_path / "late" / "1")
    late = requests_in(tmp_path / "late" / "1")
    (entry,) = late

    def refuse(_path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        batch = late.log.begin_batch(["a", "b"])
        late.log.end_batch(batch)
        late.expect(entry, ABSENT, None)
        late.forget(entry)
    assert len(late) == 0
    late.close(remove=False)


@pytest.mark.parametrize("source", [b"", b"\xff\xfe"])
@pytest.mark.parametrize("is_mounted_anew", [True, False])
async def test_a_damaged_source_of_staged_files_ends_no_mount(
    mount: MortalMount, source: bytes, *, is_mounted_anew: bool
) -> None:
    async with mount.serving() as process:
        await process.save("file", b"content")
    (path,) = mount.directory.glob("**/staging/**/source")
    path.write_bytes(source)
    if is_mounted_anew:
        mount.reboot()
    async with mount.serving() as process:
        assert await process.load("file") == b"content"
    assert mount.store.contents() == {"file": b"content"}


CHANGES = [
    Change(PUT, "a", ("0123456789abcdef-1",)),
    Change(COPY, "dir/ü", ("0123456789abcdef-2", "0123456789abcdef-1"), '"etag"'),
    Change(DELETE, "k" * 1024),
]


def test_what_has_ended_is_not_left(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    slots = [log.begin(change) for change in CHANGES]
    assert sorted(unanswered_in(tmp_path), key=CHANGES.index) == CHANGES
    log.end(slots[1])
    assert set(unanswered_in(tmp_path)) == {CHANGES[0], CHANGES[2]}
    log.close(remove=False)
    assert set(unanswered_in(tmp_path)) == {CHANGES[0], CHANGES[2]}


def test_there_are_more_slots_when_all_are_taken_but_no_larger_ones(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    changes = {Change(PUT, f"key-{number}") for number in range(3 * SLOTS)}
    slots = [log.begin(change) for change in changes]
    assert set(unanswered_in(tmp_path)) == changes
    for slot in [*slots, log.begin(Change(PUT, "k" * SLOT))]:
        log.end(slot)
    assert unanswered_in(tmp_path) == []
    log.close(remove=True)


def test_many_deletes_of_one_request_are_on_record_together(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    batch = log.begin_batch(["a", "b"])
    assert unanswered_in(tmp_path) == [Change(DELETE, "a"), Change(DELETE, "b")]
    whole = batch.read_bytes()
    for size in range(len(whole)):
        batch.write_bytes(whole[:size])
        assert unanswered_in(tmp_path) == []
    log.end_batch(batch)
    log.begin_batch(["a", "b"])
    log.begin(CHANGES[0])
    log.close(remove=False)
    RequestLog(tmp_path).close(remove=True)
    assert list(tmp_path.iterdir()) == [], "a new log is empty"


def test_a_slot_that_was_being_filled_is_not_taken_for_a_change(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    slot = log.begin(CHANGES[0])
    log.close(remove=False)
    path = tmp_path / "requests"
    whole = path.read_bytes()
    start = slot * SLOT
    size = 8 + len(CHANGES[0].text())
    for at in range(start, start + size):
        for value in (0, whole[at] ^ 0x40):
            torn = whole[:at] + bytes([value]) + whole[at + 1 :]
            path.write_bytes(torn)
            assert unanswered_in(tmp_path) == ([CHANGES[0]] if torn == whole else [])
    path.write_bytes(whole[: start + size - 1])
    assert unanswered_in(tmp_path) == []
