"""Records of staged files, and of attributes that are to be sent."""

import errno
import os
import stat
from pathlib import Path

import pytest

from fusefs.posix.journal.journal import Journal
from fusefs.posix.journal.line_log import LineLog, line, load_lines
from fusefs.posix.metadata.deferred_attributes import DeferredChange, load
from fusefs.posix.nodes.inode import FileState, StagedFile
from fusefs.posix.nodes.inode_table import Inode, InodeTable
from fusefs.posix.nodes.object_metadata import Meta
from fusefs.posix.write import staging_record
from fusefs.posix.write.staging import Staging
from fusefs.store.interface import ObjectInfo
from tests.support.machine.disks import fill, small_disk

META = Meta(stat.S_IFREG | 0o640, 1000, 1001)


def staged_in(directory: Path, meta: Meta = META) -> tuple[Inode, StagedFile]:
    inodes = InodeTable("", Journal(None))
    inode = inodes.create(inodes.root, "file", ObjectInfo("file", 0, "", 0))
    staging = Staging(directory, "bucket")
    return inode, staging.begin(inode, staging.prepare(inode), meta, None)


def taken_up(directory: Path, inode: Inode) -> StagedFile | None:
    inode.staged = None
    return Staging(directory, "bucket").restore(inode)


async def test_a_new_file_needs_no_record_beside_it(tmp_path: Path) -> None:
    inode, staged = staged_in(tmp_path)
    os.write(staged.fd, b"content")
    assert set(os.listdir(tmp_path)) == {"source", str(inode.nodeid)}
    found = taken_up(tmp_path, inode)
    assert (found.meta, found.etag, found.is_dirty, found.size()) == (META, None, True, 7)


@pytest.mark.parametrize("is_meta_dirty", [True, False])
async def test_what_the_bucket_has_of_an_open_file_is_on_record(
    tmp_path: Path, *, is_meta_dirty: bool
) -> None:
    inode, staged = staged_in(tmp_path)
    os.utime(staged.fd, ns=(1, 1_700_000_000_000_000_001))
    staged.uploaded, staged.etag = staged.changes, '"0123456789abcdef0123456789abcdef"'
    staged.is_meta_dirty = is_meta_dirty
    Staging.record(Staging(tmp_path, "bucket"), staged)
    found = taken_up(tmp_path, inode)
    assert (found.etag, found.is_content_dirty) == (staged.etag, False)
    assert (found.meta, found.is_meta_dirty) == (META, is_meta_dirty)


LONG = META.changed(xattrs=(("user.a", b"b" * 1500),))


@pytest.mark.parametrize("meta", [META, META.changed(xattrs=(("user.a", b"b"),)), LONG])
async def test_what_is_closed_or_has_more_to_say_has_a_whole_record(
    tmp_path: Path, meta: Meta
) -> None:
    inode, staged = staged_in(tmp_path, meta)
    Staging(tmp_path, "bucket").close(staged)
    assert (tmp_path / f"{inode.nodeid}.json").exists() == (meta is LONG)
    found = taken_up(tmp_path, inode)
    assert (found.meta, found.is_closed) == (meta, True)


@pytest.mark.parametrize("meta", [META, LONG])
async def test_what_is_safe_has_a_whole_record_until_the_bucket_has_it(
    tmp_path: Path, meta: Meta
) -> None:
    inode, staged = staged_in(tmp_path, meta)
    staging = Staging(tmp_path, "bucket")
    await staging.make_safe(staged)
    found = staging_record.load(Path(staged.path))
    assert found is not None
    assert (found[1]["key"], found[1]["is_closed"]) == ("file", True)
    staged.state = FileState.OPEN
    staging.record(staged)
    left = taken_up(tmp_path, inode)
    assert (left.meta, left.is_closed) == (meta, False)


async def test_a_file_system_without_attributes_has_record_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_record, "write_attribute", lambda _fd, _record: False)
    inode, staged = staged_in(tmp_path)
    await Staging(tmp_path, "bucket").make_safe(staged)
    found = taken_up(tmp_path, inode)
    assert (found.meta, found.is_closed) == (META, True)


async def test_a_file_without_a_record_goes(tmp_path: Path) -> None:
    inode, staged = staged_in(tmp_path)
    os.removexattr(staged.fd, "user.fusefs")
    assert taken_up(tmp_path, inode) is None
    assert not os.access(staged.path, os.F_OK)


def test_a_record_that_a_full_disk_cuts_off_leaves_the_earlier_one(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        path = disk / "5"
        staging_record.write(str(path), b"earlier")
        filler = fill(disk)
        os.truncate(filler, filler.stat().st_size - 8192)
        with pytest.raises(OSError, match="No space"):
            staging_record.write(str(path), bytes(100_000))
        assert path.with_suffix(".json").read_bytes() == b"earlier"


@pytest.mark.parametrize("record", [b"", b"{", b"\xff"])
async def test_the_content_of_a_damaged_record_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, record: bytes
) -> None:
    inode, staged = staged_in(tmp_path)
    os.write(staged.fd, b"content")
    (tmp_path / f"{inode.nodeid}.json").write_bytes(record)
    assert taken_up(tmp_path, inode) is None
    kept = tmp_path / f"damaged-{inode.nodeid}"
    assert kept.read_bytes() == b"content"
    assert str(kept) in caplog.text
    assert set(os.listdir(tmp_path)) == {"source", kept.name}


async def test_a_record_keeps_the_tokens_of_its_requests(tmp_path: Path) -> None:
    change = DeferredChange(ObjectInfo("a", 3, '"etag"', 5), META, ("t-1", "t-2"))
    (tmp_path / "attributes").write_bytes(change.line())
    (found,) = load(tmp_path, META)
    assert (found.info, found.meta, found.tokens) == (change.info, META, change.tokens)


def test_the_last_line_of_a_key_holds(tmp_path: Path) -> None:
    log = LineLog(tmp_path / "log")
    for number in range(3):
        log.append(line(["a", number]))
        log.append(line(["b", number]))
    log.done(["b"])
    assert load_lines(tmp_path / "log") == {"a": [2]}
    log.write_anew([line(["c", 1])])
    log.append(line(["d", 1]))
    assert load_lines(tmp_path / "log") == {"c": [1], "d": [1]}
    log.write_anew([])
    assert (tmp_path / "log").read_bytes() == b""
    log.append(line(["e", 1]))
    assert load_lines(tmp_path / "log") == {"e": [1]}


@pytest.mark.parametrize("torn", [b'["a", "e", 1', b"\0\0\0", b"7", b'["b", 1]', b"\xff"])
async def test_a_line_that_was_torn_is_passed_over(tmp_path: Path, torn: bytes) -> None:
    whole = [DeferredChange(ObjectInfo(key, 3, '"etag"', 5), META) for key in "ac"]
    log = LineLog(tmp_path / "attributes")
    log.append(whole[0].line())
    with (tmp_path / "attributes").open("ab") as file:
        file.write(torn + b"\n")
    log.append(whole[1].line())
    assert [found.line() for found in load(tmp_path, META)] == [one.line() for one in whole]


def test_a_line_that_a_full_disk_cuts_off_is_refused_and_spoils_no_other(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        log = LineLog(disk / "log")
        log.append(line(["a", 1]))
        fill(disk)

        def put_many() -> None:
            for number in range(20_000):
                log.append(line([f"b{number:06}", '"etag"', 3, 5, {"uid": str(number)}]))

        with pytest.raises(OSError, match="No space") as refused:
            put_many()
        assert refused.value.errno == errno.ENOSPC
        whole = load_lines(disk / "log")
        assert (disk / "log").read_bytes().endswith(b"\n")
        (disk / "filler").unlink()
        log.append(line(["c", 2]))
        assert load_lines(disk / "log") == {**whole, "c": [2]}
        log.close(remove=True)
