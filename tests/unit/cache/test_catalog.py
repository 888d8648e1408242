"""The catalog: rows that are merged, refused, summed up, and dropped when they can't be trusted."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.cache.catalog import Catalog, Row
from fusefs.cache.integrity.checksums import Sum
from fusefs.cache.ranges import RangeMap

BOOT, OTHER_BOOT = "boot-1", "boot-2"


def catalog(directory: Path, boot_id: str = BOOT) -> Catalog:
    return Catalog(directory / "catalog.sqlite3", boot_id)


@pytest.fixture
def table(tmp_path: Path) -> Catalog:
    return catalog(tmp_path)


def row(name: str = "a", *ranges: tuple[int, int], generation: str = "g1", at: float = 1.0) -> Row:
    return Row(name, generation, 7, 1000, RangeMap(iter(ranges)).pack(), at)


def ranges(found: Row | None) -> list[tuple[int, int]]:
    return list(RangeMap.unpack(found.ranges))


def test_ranges_are_merged_with_what_another_mount_recorded(tmp_path: Path) -> None:
    one, other = catalog(tmp_path), catalog(tmp_path)
    one.record([row("a", (0, 10))])
    assert other.record([row("a", (5, 20), (30, 40))]) == ([True], (30, 1))
    assert ranges(one.find("a")) == [(0, 20), (30, 40)]


@pytest.mark.parametrize("stranger", [{"generation": "g2"}, {"st_ino": 8}])
def test_a_row_of_another_file_is_left_alone(table: Catalog, stranger: dict[str, object]) -> None:
    table.record([row("a", (0, 10))])
    assert table.record([replace(row("a", (0, 500)), **stranger)]) == ([False], (10, 1))
    other = replace(row("a"), **stranger)
    assert table.remove(other.name, other.generation, other.st_ino) == (10, 1)
    assert ranges(table.find("a")) == [(0, 10)]


def test_inode_numbers_may_have_64_bits(tmp_path: Path) -> None:
    st_ino = (1 << 64) - 5
    one = replace(row("a", (0, 10)), st_ino=st_ino, sums=(Sum(0, 10, 1),))
    table = catalog(tmp_path)
    for _ in range(2):
        assert table.record([one]) == ([True], (10, 1))
    table.rename("a", "g1", st_ino, "b")
    table.mark_synced([replace(one, name="b")])
    table.close()
    table = catalog(tmp_path, OTHER_BOOT)
    assert table.newest(1000) == [replace(one, name="b", is_synced=True, sums=())]
    assert table.sums(st_ino, "g1", 0, 10) == [Sum(0, 10, 1)]
    assert table.remove("b", "g1", st_ino) == (0, 0)
    assert table.sums(st_ino, "g1", 0, 10) == []


def test_after_another_boot_only_synced_rows_count(table: Catalog, tmp_path: Path) -> None:
    table.record([row("safe", (0, 10)), row("unsafe", (0, 10))])
    assert table.mark_synced([row("safe", (0, 10))]) == 1
    table.close()
    again = catalog(tmp_path, OTHER_BOOT)
    assert [one.name for one in again.newest(1000)] == ["safe"]
    assert again.total().bytes == 10


def test_a_synced_row_of_an_earlier_boot_is_unsafe_once_more_has_arrived(
    table: Catalog, tmp_path: Path
) -> None:
    table.record([row("a", (0, 10))])
    table.mark_synced([row("a", (0, 10))])
    table.record([row("a", (0, 10))])
    assert table.newest(1000)[0].is_synced
    table.close()
    second = catalog(tmp_path, OTHER_BOOT)
    second.record([row("a", (10, 20))])
    # As a file that got more while it was synced.
    assert second.mark_synced([row("a", (0, 10))]) == second.mark_synced([]) == 0
    second.close()
    assert len(catalog(tmp_path, OTHER_BOOT).newest(1000)) == 1
    assert catalog(tmp_path, "boot-3").newest(1000) == []


def test_a_wrong_total_is_damage(table: Catalog, tmp_path: Path) -> None:
    table.record([row("a", (0, 10))])
    table.close()
    with sqlite3.connect(tmp_path / "catalog.sqlite3") as db:
        db.execute("UPDATE total SET bytes = 12345")
    assert catalog(tmp_path).total() == (0, 0)


def test_a_full_disk_fails_all_of_a_batch_and_not_the_next_one(table: Catalog) -> None:
    table.record([row("a", (0, 10))])
    pages = table._db.execute("PRAGMA page_count").fetchone()[0]
    table._db.execute(f"PRAGMA max_page_count={pages}")
    many = [row(f"name-{number:060}", (0, 10)) for number in range(500)]
    with pytest.raises(sqlite3.OperationalError):
        table.record(many)
    assert (len(table.newest(1000)), table.total().bytes) == (1, 10)
    table._db.execute("PRAGMA max_page_count=1000000")
    assert table.record(many)[1] == (5010, 501)


def test_mounts_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    tables = [catalog(tmp_path) for _ in range(4)]

    def write(index: int) -> None:
        for number in range(50):
            tables[index].record(
                [row(f"{index}-{number}", (0, 3)), row("all", (number, number + 1))]
            )

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert tables[0].total().bytes == 4 * 50 * 3 + 50
    assert ranges(tables[0].find("all")) == [(0, 50)]


RANGE = st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda pair: (pair[0], sum(pair)))
STEP = st.one_of(
    st.tuples(st.just("record"), st.sampled_from("abc"), st.sampled_from(["g1", "g2"]), RANGE),
    st.tuples(st.just("remove"), st.sampled_from("abc"), st.sampled_from(["g1", "g2"]), RANGE),
)


@given(st.lists(STEP, max_size=30))
def test_the_total_is_the_sum_of_all_ranges(steps: list[tuple[str, str, str, tuple]]) -> None:
    table = Catalog(Path(":memory:"), BOOT)
    model: dict[str, tuple[str, set[int]]] = {}
    for action, name, generation, (start, stop) in steps:
        known = model.get(name)
        is_ours = known is None or known[0] == generation
        if action == "record":
            accepted, total = table.record([row(name, (start, stop), generation=generation)])
            assert accepted == [is_ours]
            if is_ours:
                model.setdefault(name, (generation, set()))[1].update(range(start, stop))
        else:
            total = table.remove(name, generation, 7)
            if known is not None and is_ours:
                del model[name]
        assert total == (sum(len(present) for _, present in model.values()), len(model))
    found = {
        one.name: {byte for start, stop in ranges(one) for byte in range(start, stop)}
        for one in table.newest(1000)
    }
    assert found == {name: present for name, (_, present) in model.items()}


def test_mounts_may_open_a_new_catalog_at_the_same_moment(tmp_path: Path) -> None:
    for number in range(10):
        path = tmp_path / f"{number}.db"
        ready = threading.Barrier(8)

        def open_catalog(path: Path = path, ready: threading.Barrier = ready) -> Catalog:
            ready.wait()
            return Catalog(path, "boot")

        with ThreadPoolExecutor(8) as pool:
            for opening in [pool.submit(open_catalog) for _ in range(8)]:
                opening.result().close()


def test_the_oldest_come_page_by_page_without_what_is_retained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusefs.cache.catalog.PAGE", 2)
    table = catalog(tmp_path)
    used = {"a": 5.0, "b": 1.0, "c": 1.0, "d": 3.0, "e": 2.0}
    table.record([row(name, (0, 1), at=at) for name, at in used.items()])
    table.retain("bucket", {"key": "e"}, 0.0)
    after, found = (-1.0, ""), []
    while rows := table.oldest(after):
        found.append([one.name for one in rows])
        after = (rows[-1].used_at, rows[-1].name)
    assert found == [["b", "c"], ["d", "a"]]
