"""The cache's directory: whose it is, what a bad disk does to it, and its end."""

import errno
import fcntl
import os
import sqlite3
import time
from pathlib import Path

import pytest
import trio

from fusefs.cache import catalog, catalog_writer, disk, file_cache
from fusefs.cache.catalog import Catalog
from fusefs.cache.disk import CacheDirectoryError, Disk, prepare_directory
from fusefs.cache.evictor import MOST_REFUSED
from fusefs.cache.file_cache import FileCache
from fusefs.cache.integrity import trouble
from fusefs.cache.purge import find_obstacles
from fusefs.cache.quota import Quota
from tests.support.local_cache import Parts, cache_in, version
from tests.support.semantics import states


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    prepare_directory(tmp_path / "new" / "cache")
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700
    prepare_directory(tmp_path / "new" / "cache")


@pytest.mark.parametrize("mark", [b"fusefs cache 99\n", b"", b"\xff\xfe"])
def test_a_directory_of_another_format_is_refused(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "format").write_bytes(mark)
    with pytest.raises(CacheDirectoryError, match="remove it"):
        prepare_directory(tmp_path)


@pytest.mark.parametrize("mark", [b"fusefs cache 99\n", b""])
def test_a_mount_that_is_served_goes_on_whatever_the_mark_is(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "format").write_bytes(mark)
    prepare_directory(tmp_path, in_any_case=True)


FILES = 60


@states(
    "The end of a mount waits some seconds at most for its cached files to be safe "
    "against a power cut; what was not is fetched again after one."
)
async def test_a_slow_disk_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not made safe in time counts as lost after a power cut, and only then."""
    synced = []

    def sync_slowly(_self: Disk, name: str, _generation: str) -> bool:
        time.sleep(0.02)
        synced.append(name)
        return True

    monkeypatch.setattr(file_cache, "SYNC_AFTER_S", 0.1)
    monkeypatch.setattr(catalog_writer, "SYNC_GO_S", 0.1)
    async with cache_in(tmp_path) as parts:
        for number in range(FILES):
            await parts.fetch(version(str(number), 100))
        monkeypatch.setattr(Disk, "sync", sync_slowly)
    assert 0 < len(synced) < FILES
    async with cache_in(tmp_path) as parts:
        for number in range(FILES):
            await parts.fetch(version(str(number), 100))
        assert parts.bucket.requested == []


async def test_a_directory_that_a_mount_reads_is_in_use(tmp_path: Path) -> None:
    async with cache_in(tmp_path / "0123456789abcdef"):
        assert find_obstacles(tmp_path) == {"is_used": True, "leftovers": 0}
    assert find_obstacles(tmp_path) == {"is_used": False, "leftovers": 0}


async def test_what_is_not_safe_yet_when_the_mount_ends_is_made_safe_then(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(version("a", 10_000))
        await parts.cache.record()
        with trio.CancelScope() as ending:
            ending.cancel()
            await parts.cache._catalog_writer.sync(idle_s=0.0)
    [row] = Catalog(tmp_path / "catalog.sqlite3", "another boot").newest(1000)
    assert row.is_synced


MIB = 1 << 20
A = version("a", MIB)


def refuse(number: int) -> OSError:
    return OSError(number, os.strerror(number))


async def test_a_file_that_cannot_be_unlinked_can_be_opened(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(*_: object) -> None:
        raise refuse(errno.ENOSPC)  # as btrfs does when it is full

    await parts.fetch(A)
    file = parts.cache.find(A)
    assert file is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        assert not await parts.evictor.drop(file)
    (path,) = parts.files()
    with path.open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)  # else an open would wait for ever
    await parts.fetch(A)
    assert len(parts.bucket.requested) == 1


async def test_a_disk_that_removes_nothing_is_tried_with_a_few_files_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def unlink(_disk: disk.Disk, name: str, _generation: str) -> None:
        tried.append(name)
        raise refuse(errno.EROFS)  # as ext4 is after an error

    size = 1000
    async with cache_in(tmp_path, limit=200 * size) as parts:
        for number in range(200):
            await parts.fetch(version(f"{number}", size))
        with monkeypatch.context() as patch:
            patch.setattr(disk.Disk, "unlink", unlink)
            assert not await parts.evictor.reserve(size)
            once = len(tried)
            assert 0 < once <= 3 * MOST_REFUSED
            # Others may be removed: they have their turn.
            assert not await parts.evictor.reserve(size)
        assert len(tried) == len(set(tried)) > once
        assert await parts.evictor.reserve(size)


async def test_a_disk_without_locks_costs_no_descriptors(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = (fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW)
    call = fcntl.fcntl

    def without_locks(fd: int, command: int, *arguments: int) -> object:
        if command in locks:
            raise refuse(errno.ENOLCK)
        return call(fd, command, *arguments)

    await parts.fetch(A)
    file = parts.cache.find(A)
    assert file is not None
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", without_locks)
        assert not await parts.evictor.drop(file)
        parts.cache.pin_again(file)
        assert not await parts.cache.ensure_open(file)
    assert len(os.listdir("/proc/self/fd")) <= before
    parts.cache.unpin(file)


def busy(code: int = sqlite3.SQLITE_BUSY) -> sqlite3.Error:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize("error", [refuse(errno.EMFILE), refuse(errno.EROFS), busy()])
async def test_what_cannot_be_opened_for_now_stays_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    async with cache_in(tmp_path) as parts:
        await parts.fetch(A)
    async with cache_in(tmp_path) as parts:
        with monkeypatch.context() as patch:
            patch.setattr(disk.Disk, "open", fail)
            file = parts.cache.pin(A)
            assert not await parts.cache.ensure_open(file)
            parts.cache.unpin(file)
        await parts.cache.record()
        await parts.fetch(A)
        assert parts.bucket.requested == []
        assert (parts.quota.used, len(parts.files())) == (MIB, 1)


async def test_a_trouble_is_shown_for_an_hour_and_the_next_one_is_logged(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(trouble.time, "monotonic", lambda: now)
    parts.cache.warn("No space left on device")
    parts.cache.warn("No space left on device")
    now += trouble.RECENT_S + 1
    assert parts.cache.trouble.recent is None  # it was full for a minute
    parts.cache.warn("Input/output error")
    assert "Input/output error" in (parts.cache.trouble.recent or "")
    assert "No space" not in (parts.cache.trouble.recent or "")
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ["No space" in logged[0], "Input/output" in logged[1], len(logged)] == [True, True, 2]


async def test_a_mount_that_begins_another_catalog_removes_no_file_that_others_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "ORPHAN_AGE_S", 0.0)
    async with cache_in(tmp_path) as damaged, cache_in(tmp_path) as other:
        await other.fetch(A)
        held = other.cache.pin(A)
        assert await other.cache.ensure_open(held)
        await damaged.fetch(version("b", MIB))
        assert await damaged.cache._catalog_writer.recover_from(sqlite3.DatabaseError("damaged"))
        await damaged.cache.record()
        await damaged.cache.sweep()
        assert len(other.files()) == 2
        other.cache.unpin(held)


def no_descriptor(_directory: Path) -> None:
    raise refuse(errno.EMFILE)


@pytest.mark.parametrize("error", [busy(sqlite3.SQLITE_IOERR_READ), sqlite3.DatabaseError()])
async def test_a_takeover_goes_on_without_rows_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: sqlite3.Error
) -> None:
    def fail(*_: object) -> None:
        raise error

    quota = Quota(tmp_path, None, lambda _size: 0)
    monkeypatch.setattr(Catalog, "newest", fail)
    monkeypatch.setattr(catalog, "alone_in", no_descriptor)
    with pytest.raises(CacheDirectoryError):
        FileCache(tmp_path, "test", quota)
    await FileCache(tmp_path, "test", quota, in_any_case=True).aclose(sync=False)


def test_a_folder_that_cannot_be_read_has_no_file(tmp_path: Path) -> None:
    (tmp_path / "ab").write_bytes(b"")
    assert Disk(tmp_path).generation_of("ab" * 16, 1) is None


async def test_a_damaged_catalog_that_cannot_be_replaced_disables_nothing(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "alone_in", no_descriptor)
    assert await parts.cache._catalog_writer.recover_from(sqlite3.DatabaseError("damaged"))
    await parts.fetch(A)
    await parts.cache.record()
    assert (parts.cache.trouble.recent, parts.quota.used) == (None, MIB)
