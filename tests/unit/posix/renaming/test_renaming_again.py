"""Requests that come twice: whoever did them first died somewhere, unnoticed.

The process is killed at each point in turn: before and after every request to
the bucket, every record of the journal, and every record of a staged file.
"""

import errno
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fusefs.posix.journal.journal import Journal
from fusefs.store.errors import StoreError
from tests.support.memory_store import MemoryStore, failing
from tests.support.survival.fate import Fate, fate_of_records
from tests.support.survival.mortal_mount import DiedError, MortalMount, Process


@pytest.fixture
def fate(monkeypatch: pytest.MonkeyPatch) -> Fate:
    return fate_of_records(monkeypatch)


@dataclass
class Case:
    """A request, what there is before it, and what there is after it."""

    before: dict[str, bytes]
    request: Callable[[Process, int], Awaitable[None]]
    after: dict[str, bytes]
    listing: dict[str, list[str]]
    open: str = ""
    new: str = ""

    async def set_up(self, process: Process, store: MemoryStore) -> list[int]:
        """Returns the handles that are open: of a file that was changed, or of a new one."""
        for key, data in self.before.items():
            store.put(key, data)
        handles = []
        if self.open:
            handles.append(await process.open(self.open, os.O_RDWR))
            await process.write(handles[-1], 0, b"E")
        if self.new:
            handles.append(await process.create(self.new, b"new"))
        return handles


CASES = {
    "mkdir": Case(
        {}, lambda process, unique: process.mkdir("a", unique), {}, listing={"": ["a"], "a": []}
    ),
    "symlink": Case(
        {},
        lambda process, unique: process.symlink("a", b"target", unique),
        {"a": b"target"},
        listing={"": ["a"]},
    ),
    "unlink": Case(
        {"d/a": b"a", "d/b": b"b"},
        lambda process, unique: process.unlink("d/a", unique),
        {"d/b": b"b"},
        listing={"d": ["b"]},
    ),
    "unlink of the last file": Case(
        {"d/a": b"a"},
        lambda process, unique: process.unlink("d/a", unique),
        {},
        listing={"": ["d"], "d": []},
    ),
    "unlink of a file that is changed": Case(
        {"a": b"a"},
        lambda process, unique: process.unlink("a", unique),
        {},
        listing={"": []},
        open="a",
    ),
    "unlink of a new file": Case(
        {}, lambda process, unique: process.unlink("a", unique), {}, listing={"": []}, new="a"
    ),
    "rmdir": Case(
        {"d/a/": b""},
        lambda process, unique: process.rmdir("d/a", unique),
        {},
        listing={"": ["d"], "d": []},
    ),
    "rename": Case(
        {"d/a": b"a"},
        lambda process, unique: process.rename("d/a", "b", unique=unique),
        {"b": b"a"},
        listing={"": ["b", "d"], "d": []},
    ),
    "rename over a file": Case(
        {"a": b"a", "b": b"bb"},
        lambda process, unique: process.rename("a", "b", unique=unique),
        {"b": b"a"},
        listing={"": ["b"]},
    ),
    "rename of a file that is changed": Case(
        {"a": b"a", "b": b"b"},
        lambda process, unique: process.rename("a", "b", unique=unique),
        {"b": b"E"},
        listing={"": ["b"]},
        open="a",
    ),
    "rename over a file that is changed": Case(
        {"a": b"a", "b": b"b"},
        lambda process, unique: process.rename("a", "b", unique=unique),
        {"b": b"a"},
        listing={"": ["b"]},
        open="b",
    ),
    "rename of a new file": Case(
        {"b": b"b"},
        lambda process, unique: process.rename("a", "b", unique=unique),
        {"b": b"new"},
        listing={"": ["b"]},
        new="a",
    ),
    "rename of a new file over a file that is changed": Case(
        {"b": b"b"},
        lambda process, unique: process.rename("a", "b", unique=unique),
        {"b": b"new"},
        listing={"": ["b"]},
        open="b",
        new="a",
    ),
    "rename of a directory": Case(
        {"d/a": b"a", "d/b": b"bb", "d/s/": b""},
        lambda process, unique: process.rename("d", "e", unique=unique),
        {"e/a": b"E", "e/b": b"bb", "e/n": b"new"},
        listing={"": ["e"], "e": ["a", "b", "n", "s"]},
        open="d/a",
        new="d/n",
    ),
    "rename of a directory over an empty one": Case(
        {"d/a": b"a", "d/": b"", "e/": b""},
        lambda process, unique: process.rename("d", "e", unique=unique),
        {"e/a": b"a"},
        listing={"": ["e"], "e": ["a"]},
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_request_that_comes_again_is_answered_as_the_first_time(
    tmp_path: Path, fate: Fate, name: str
) -> None:
    case = CASES[name]
    for mount in fate.mounts(tmp_path):
        unique = mount.new_unique()
        with fate.process():
            async with mount.serving() as process:
                handles = await case.set_up(process, mount.store)
                fate.count()
                await case.request(process, unique)
        async with mount.serving() as process:
            await case.request(process, unique)
            await check(case, mount, process, handles)


@pytest.mark.parametrize("is_open", [False, True])
async def test_what_is_replaced_may_be_closed_before_its_rename_comes_again(
    tmp_path: Path, fate: Fate, is_open: bool
) -> None:
    """It was put in place of the only copy of what was renamed."""
    for mount in fate.mounts(tmp_path):
        mount.store.put("a", b"a")
        mount.store.put("b", b"b")
        unique = mount.new_unique()
        with fate.process():
            async with mount.serving() as process:
                if is_open:
                    await process.open("a", os.O_RDWR)
                fh = await process.open("b", os.O_RDWR)
                await process.write(fh, 0, b"E")
                fate.count()
                await process.rename("a", "b", unique=unique)
        async with mount.serving() as process:
            await process.close(fh)
            await process.rename("a", "b", unique=unique)
            assert mount.store.contents() == {"b": b"a"}
            assert await process.listing() == ["b"]


@pytest.mark.parametrize("replaced", ["of the bucket", "new"])
async def test_what_a_rename_that_failed_was_to_replace_is_uploaded_by_its_close(
    mount: MortalMount, replaced: str
) -> None:
    mount.store.put("a", b"a")
    async with mount.serving() as process:
        if replaced == "new":
            fh = await process.create("b", b"E")
        else:
            mount.store.put("b", b"b")
            fh = await process.open("b", os.O_RDWR)
            await process.write(fh, 0, b"E")
        mount.store.before = failing(StoreError("refused"), ("DELETE", "a"))
        with pytest.raises(StoreError):
            await process.rename("a", "b")
    async with mount.serving() as process:
        await process.close(fh)
        assert mount.store.contents() == {"a": b"a", "b": b"E"}


async def check(case: Case, mount: MortalMount, process: Process, handles: list[int]) -> None:
    for fh in reversed(handles):  # what was replaced is closed last
        await process.close(fh)
    assert mount.store.contents() == case.after
    for path, names in case.listing.items():
        assert await process.listing(path) == names
    for path, data in case.after.items():
        if not case.open and not case.new:
            assert await process.load(path) == data
    assert process.changes.renames.describe() == []


@pytest.mark.parametrize(
    ("request_", "number"),
    [
        (lambda process, unique: process.mkdir("a", unique), errno.EEXIST),
        (lambda process, unique: process.symlink("a", b"x", unique), errno.EEXIST),
        (lambda process, unique: process.rmdir("d", unique), errno.ENOTEMPTY),
        (lambda process, unique: process.rename("a", "d/b", flags=1, unique=unique), errno.EEXIST),
        (lambda process, unique: process.rename("d", "e", unique=unique), errno.ENOTEMPTY),
    ],
)
async def test_what_was_refused_is_refused_again(
    mount: MortalMount, request_: Callable[[Process, int], Awaitable[None]], number: int
) -> None:
    """The first process died before its answer arrived."""
    for key in ("a", "d/b", "e/c"):
        mount.store.put(key, key.encode())
    before = mount.store.contents()
    unique = mount.new_unique()
    for _ in range(2):
        async with mount.serving() as process:
            with pytest.raises(OSError, match=rf"\[Errno {number}\]"):
                await request_(process, unique)
    assert mount.store.contents() == before


async def test_what_is_under_way_is_known_after_the_journal_was_compacted(
    mount: MortalMount,
) -> None:
    unique = mount.new_unique()
    async with mount.serving() as process:
        mount.store.put("a", b"a")

        def compact(what: str, _key: str) -> None:
            if what == "DELETE":
                log = process.operations.handles._log
                assert isinstance(log, Journal)
                log.begin_compaction()
                process.changes.write_all(log)
                for inode in process.operations.inodes.all():
                    inode.log_to(log)
                log.finish_compaction()

        mount.store.after = compact
        await process.unlink("a", unique)
    mount.store.heal()
    async with mount.serving() as process:
        await process.unlink("a", unique)
        with pytest.raises(FileNotFoundError):
            await process.unlink("a")


@pytest.mark.parametrize("change", ["rename", "refused rename", "unlink"])
async def test_an_upload_whose_end_was_not_seen_leaves_no_object_behind(
    mount: MortalMount, change: str
) -> None:
    """A rename that cannot delete it fails."""
    async with mount.killed() as process:
        fh = await process.create("a", b"data")
        mount.store.after = failing(DiedError, "PUT")
        await process.close(fh)
    mount.store.heal()
    assert mount.store.contents() == {"a": b"data"}
    async with mount.serving() as process:
        if change == "refused rename":
            mount.store.before = failing(StoreError("refused"), ("DELETE", "a"))
            with pytest.raises(StoreError):
                await process.rename("a", "b", flags=1)
            assert "a" in {*mount.store.contents()} & {*await process.listing("")}
            mount.store.heal()
        if change == "rename":
            await process.rename("a", "b")
        else:
            await process.unlink("a")
        await process.close(fh)
    assert mount.store.contents() == ({"b": b"data"} if change == "rename" else {})
