"""A damaged catalog is removed, and the cache starts empty; what it still tells is right.

Random bytes of a small catalog are changed, more of them under `make storm`.
"""

import logging
import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fusefs.cache.catalog import Catalog, Row
from fusefs.cache.file_cache import FileCache
from fusefs.cache.integrity.damage import DamagedCatalogError
from fusefs.cache.quota import Quota
from fusefs.cache.ranges import RangeMap
from tests.support.mounting import WRITABLE, Mount, Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, stored
from tests.support.sharing import in_storms
from tests.support.survival.surviving import replace_daemon
from tests.support.waiting import until

BOOT = "boot-1"
sampled = in_storms("sample", ordinary=80, storm=3000)


def catalog(directory: Path, boot_id: str = BOOT) -> Catalog:
    return Catalog(directory / "catalog.sqlite3", boot_id)


def row(name: str, *ranges: tuple[int, int]) -> Row:
    return Row(name, "g1", 7, 1000, RangeMap(iter(ranges)).pack(), 1.0)


ROWS = [row(f"{number:032x}", (0, 10), (20, 20 + number)) for number in range(1, 30)]
SYNCED = ROWS[:10]


def filled(directory: Path) -> bytes:
    """The bytes of a catalog with rows, closed as at the end of a mount."""
    table = catalog(directory)
    table.record(ROWS)
    table.mark_synced(SYNCED)
    table.close()
    return (directory / "catalog.sqlite3").read_bytes()


def known(rows: Iterable[Row]) -> dict[str, Row]:
    """The rows by name; the time of the last use has no checksum and does no harm."""
    return {one.name: replace(one, used_at=1.0, is_synced=False) for one in rows}


def positions(data: bytes, dice: random.Random, sample: int) -> list[tuple[int, int]]:
    """Which bytes are changed, and what is added to each by exclusive or."""
    # The header and the schema matter most, then what is in use.
    used = [at for at, byte in enumerate(data) if byte]
    places = dice.sample(range(1024), sample // 4) + dice.sample(used, sample // 2)
    places += dice.sample(range(len(data)), sample // 2)
    return [(at, dice.randrange(1, 256)) for at in places]


def damaged_catalogs(
    directory: Path, dice: random.Random, boot_id: str, sample: int
) -> Iterator[tuple[Catalog, tuple[int, int]]]:
    """Catalogs in which one byte was changed, each with its place and what was added to it."""
    whole = filled(directory)
    for at, change in positions(whole, dice, sample):
        with tempfile.TemporaryDirectory(dir=directory) as place:
            damaged = bytearray(whole)
            damaged[at] ^= change
            Path(place, "catalog.sqlite3").write_bytes(damaged)
            table = catalog(Path(place), boot_id)
            yield table, (at, change)
            table.close()


def works(table: Catalog) -> None:
    """Rows can be written, found and removed; damage that shows only now is got over."""
    try:
        _use(table)
    except sqlite3.Error as error:
        if not table.begin_another(error, []):
            raise
        _use(table)


def _use(table: Catalog) -> None:
    new = row("new", (0, 5))
    assert table.record([new])[0] == [True]
    # A damaged index may hide the row: its file is fetched again.
    assert known([table.find("new") or new]) == known([new])
    table.mark_synced([new])
    table.rename("new", "g1", 7, "newer")
    table.remove("newer", "g1", 7)
    assert known(rows_of(table)).items() <= known(ROWS).items()


def rows_of(table: Catalog) -> list[Row]:
    """All rows, as a mount reads them when it begins."""
    try:
        return table.newest(1000)
    except sqlite3.Error as error:
        if not table.begin_another(error, []):
            raise
        return table.newest(1000)


@sampled
def test_a_changed_byte_never_tells_a_wrong_row(
    tmp_path: Path, dice: random.Random, sample: int
) -> None:
    for table, what in damaged_catalogs(tmp_path, dice, BOOT, sample):
        assert known(rows_of(table)).items() <= known(ROWS).items(), what
        works(table)


@sampled
def test_a_row_of_another_boot_is_never_made_safe_by_a_changed_byte(
    tmp_path: Path, dice: random.Random, sample: int
) -> None:
    for table, what in damaged_catalogs(tmp_path, dice, "boot-2", sample):
        assert known(rows_of(table)).items() <= known(SYNCED).items(), what


@sampled
def test_a_catalog_cut_anywhere_is_a_beginning_or_removed(
    tmp_path: Path, dice: random.Random, sample: int
) -> None:
    whole = filled(tmp_path)
    edges = [0, 1, 99, 100, 4095, 4096, 8192]
    for cut in [*dice.sample(range(len(whole)), sample), *edges]:
        directory = tmp_path / f"cut{cut}"
        directory.mkdir()
        (directory / "catalog.sqlite3").write_bytes(whole[:cut])
        table = catalog(directory)
        assert known(rows_of(table)).items() <= known(ROWS).items(), cut
        works(table)
        table.close()
        shutil.rmtree(directory)


@sampled
def test_a_damaged_write_ahead_log_only_forgets(
    tmp_path: Path, dice: random.Random, sample: int
) -> None:
    """It has checksums of its own (https://sqlite.org/walformat.html)."""
    directory = tmp_path / "killed"
    directory.mkdir()
    first = catalog(directory)
    first.record(ROWS)
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    log = files["catalog.sqlite3-wal"]
    assert len(log) > 4096
    for number, (at, change) in enumerate(positions(log, dice, sample)):
        again = tmp_path / str(number)
        again.mkdir()
        for name, data in files.items():
            if not name.endswith("-shm"):
                (again / name).write_bytes(data)
        damaged = bytearray(log)
        damaged[at] ^= change
        (again / "catalog.sqlite3-wal").write_bytes(damaged)
        table = catalog(again)
        assert known(rows_of(table)).items() <= known(ROWS).items(), (at, change)
        works(table)
        table.close()
        shutil.rmtree(again)


def test_what_is_no_database_is_removed_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "catalog.sqlite3").write_bytes(b"not a database" * 1000)
    with caplog.at_level(logging.WARNING, logger="fusefs.cache"):
        table = catalog(tmp_path)
    [line] = caplog.messages
    assert "is damaged" in line
    assert table.record(ROWS)[0] == [True] * len(ROWS)
    table.close()
    assert known(rows_of(catalog(tmp_path))) == known(ROWS)


def test_another_format_is_removed(tmp_path: Path) -> None:
    catalog(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite3")) as db:
        db.execute("PRAGMA user_version=99")
    assert catalog(tmp_path).newest(1000) == []


def test_a_damaged_row_is_damage(tmp_path: Path) -> None:
    whole = filled(tmp_path)
    assert whole.count(ROWS[3].ranges) == 1
    changed = row("x", (0, 10), (20, 900)).ranges
    (tmp_path / "catalog.sqlite3").write_bytes(whole.replace(ROWS[3].ranges, changed))
    assert rows_of(catalog(tmp_path)) == []


def test_a_name_that_no_file_can_have_is_damage(tmp_path: Path) -> None:
    filled(tmp_path)
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite3")) as db, db:
        db.execute("UPDATE files SET name = ? WHERE name = ?", ("6d59'" + "0" * 27, ROWS[3].name))
    table = catalog(tmp_path)
    with pytest.raises(DamagedCatalogError, match="no name of a file"):
        table.names("")
    table.close()


async def test_rows_out_of_order_are_damage(tmp_path: Path) -> None:
    filled(tmp_path)
    path = tmp_path / "catalog.sqlite3"
    with closing(sqlite3.connect(path)) as db, db:
        db.executemany("INSERT INTO pins (identity, key) VALUES ('bucket', ?)", "abc")
        roots = "SELECT rootpage FROM sqlite_master WHERE name IN ('files', 'pins')"
        pages = [page for (page,) in db.execute(roots)]
    data = bytearray(path.read_bytes())
    for page in pages:
        # After a header of 8 bytes, a page has the places of its rows
        # (https://sqlite.org/fileformat.html#b_tree_pages).
        at = (page - 1) * 4096 + 8
        last = at + 2 * int.from_bytes(data[at - 5 : at - 3], "big") - 2
        data[last : last + 2] = data[at : at + 2]
    path.write_bytes(data)
    out_of_order = pytest.raises(DamagedCatalogError, match="out of order")
    with closing(catalog(tmp_path)) as table, out_of_order:
        table.names("")
    cache = FileCache(tmp_path, "bucket", Quota(tmp_path, None, lambda _size: 0))
    assert (len(cache), len(cache.retention)) == (0, 0)
    await cache.aclose(sync=False)


@pytest.mark.parametrize("value", ["'x'", "x'61'", "NULL"])
def test_values_of_wrong_types_are_damage(tmp_path: Path, value: str) -> None:
    table = catalog(tmp_path)
    table.record(ROWS)
    table.retain("bucket", {"a": ROWS[0].name}, 1.0)
    table.close()
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite3")) as db, db:
        # Else SQLite takes no NULL; the changed schema lasts until all is damaged.
        db.execute("PRAGMA writable_schema=ON")
        db.execute("UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '')")
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite3")) as db, db:
        db.execute(f"UPDATE files SET bytes = {value}")
        db.execute(f"UPDATE retained SET since = {value}")
    table = catalog(tmp_path)
    with pytest.raises(DamagedCatalogError, match="wrong types"):
        table.release("bucket", ("a", "b"), lambda _keys: ())
    with pytest.raises(DamagedCatalogError, match="wrong types"):
        table.remove(ROWS[0].name, "g1", 7)
    table.close()
    assert rows_of(catalog(tmp_path, "boot-2")) == []


OBJECTS = {f"o{number}": random.Random(number).randbytes(300_000 + number) for number in range(6)}


def garbage(mount: Mount) -> None:
    """Overwrite the catalog where it is, as a broken disk does."""
    [path] = mount.cache.glob("*/catalog.sqlite3")
    for part in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        if part.exists():
            with part.open("r+b") as file:
                file.write(os.urandom(part.stat().st_size))


def read_all(mount: Mount, names: Iterable[str] = OBJECTS) -> None:
    for name in names:
        assert (mount.path / name).read_bytes() == OBJECTS[name]


def put_all(bucket: Bucket) -> None:
    for name, data in OBJECTS.items():
        bucket.put(name, data)


@states(
    "A damaged catalog of the cache stops no mount, whenever it is noticed: the cache starts"
    " empty then, and what programs read is fetched again."
)
def test_a_mount_begins_with_garbage_as_its_catalog(bucket: Bucket, mounter: Mounter) -> None:
    put_all(bucket)
    mount = mounter()
    read_all(mount)
    until(mount.is_recorded, "what was read on record")
    mount.end()
    garbage(mount)
    mount.start()
    read_all(mount)
    until(mount.is_recorded, "what was read on record")
    mount.end()
    mount.start()
    read_all(mount)
    assert mount.status()["s3"]["gets"] == 0, "the new catalog is used"


def test_a_daemon_dies_and_the_catalog_is_damaged(bucket: Bucket, mounter: Mounter) -> None:
    put_all(bucket)
    mount = mounter("--session", "kernel", WRITABLE)
    read_all(mount, ["o0", "o1", "o2"])
    until(mount.is_recorded, "what was read on record")
    with (mount.path / "o1").open("rb", buffering=0) as file:
        garbage(mount)
        replace_daemon(mount)
        assert file.read() == OBJECTS["o1"]
        read_all(mount)
    assert "is damaged" in mount.log.read_text()
    (mount.path / "written").write_bytes(b"new")
    mount.end()
    assert stored(bucket, "written") == b"new"
    mount.start()
    read_all(mount)


def test_a_catalog_that_is_damaged_while_it_is_used(bucket: Bucket, mounter: Mounter) -> None:
    put_all(bucket)
    mount = mounter("--session", "kernel")
    read_all(mount, ["o0", "o1"])
    until(mount.is_recorded, "what was read on record")
    pid = mount.pid
    garbage(mount)
    read_all(mount)
    until(lambda: "is damaged" in mount.log.read_text(), "the damage noticed")
    # The space of what is cached still counts, and what arrives is cached.
    total = sum(map(len, OBJECTS.values()))
    until(lambda: mount.status()["cache"]["used_bytes"] >= total, "all in the cache")
    read_all(mount)
    assert mount.pid == pid
    assert "Traceback" not in mount.log.read_text()
    mount.end()
    mount.start()
    read_all(mount)
