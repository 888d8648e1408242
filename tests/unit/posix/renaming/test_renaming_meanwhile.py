"""What programs change while a directory's rename is not finished: it stays as they made it.

The rename is gone on with later: by the next process after a kill, or by the same
one where S3 refused something.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fusefs.posix.directory import pending_changes
from fusefs.posix.journal.line_log import LineLog
from fusefs.posix.namespace import prefix_copy
from fusefs.posix.namespace.prefix_copy import PrefixCopy
from fusefs.posix.namespace.rename_job import RenameJob, RenameJobs
from fusefs.posix.namespace.touched_keys import KeysTouchedMeanwhile, Phase
from fusefs.posix.types import NewAttributes
from fusefs.store.errors import ExistsError, StoreError, UnreachableError
from tests.support.held_copies import HeldCopies
from tests.support.memory_store import MemoryStore
from tests.support.semantics import states
from tests.support.survival.mortal_mount import DiedError, MortalMount, Process


@pytest.fixture
def mount(tmp_path: Path) -> MortalMount:
    mount = MortalMount(tmp_path)
    mount.store.put("a/")
    for name in "xyz":
        mount.store.put(f"a/{name}", name.encode())
    return mount


class Stop:
    """The bucket does not answer one request until `go_on` is set, and then with an `error`."""

    def __init__(self, store: MemoryStore, what: str, key: str) -> None:
        self.reached = trio.Event()
        self.go_on = trio.Event()
        self.error: StoreError | None = None
        self._store = store
        self._at = what, key
        store.pause = self._pause

    async def _pause(self) -> None:
        if self._store.requests[-1] == self._at:
            self.reached.set()
            await self.go_on.wait()
            if self.error is not None:
                raise self.error

    async def then(self, act: Callable[..., Awaitable[None]], *args: str) -> None:
        """Do something once the request is under way."""
        await self.reached.wait()
        await act(*args)

    async def end_after(self, made: Made, *keys: str) -> None:
        """Answer once these keys have been copied to."""
        await made.wait("COPY", *keys)
        self.go_on.set()


class Made:
    """Waits for requests that have been executed."""

    def __init__(self, store: MemoryStore) -> None:
        self._done: set[tuple[str, str]] = set()
        self._more = trio.Event()
        store.after = self._note

    def _note(self, what: str, key: str) -> None:
        self._done.add((what, key))
        self._more.set()
        self._more = trio.Event()

    async def wait(self, what: str, *keys: str) -> None:
        while not {(what, key) for key in keys} <= self._done:
            await self._more.wait()


@asynccontextmanager
async def killed(mount: MortalMount) -> AsyncIterator[tuple[Process, trio.Nursery]]:
    """A process that is killed at the end, with the tasks in the nursery."""
    try:
        async with mount.serving() as process, trio.open_nursery() as nursery:
            yield process, nursery
            raise DiedError
    except* DiedError:
        pass
    mount.store.pause = trio.lowlevel.checkpoint
    mount.store.before = mount.store.after = lambda _what, _key: None


@asynccontextmanager
async def killed_while_copying(mount: MortalMount) -> AsyncIterator[Process]:
    """A process that is killed once all but a/z has been copied to b/."""
    stop, made = Stop(mount.store, "COPY", "b/z"), Made(mount.store)
    async with killed(mount) as (process, nursery):
        await process.listing("a")
        nursery.start_soon(process.rename, "a", "b")
        await made.wait("COPY", "b/x", "b/y")
        await stop.reached.wait()
        yield process


async def overwrite(process: Process, path: str, data: bytes) -> None:
    fh = await process.open(path, os.O_WRONLY | os.O_TRUNC)
    await process.write(fh, 0, data)
    await process.close(fh)


async def finish(process: Process) -> None:
    for one in list(process.changes._renames._unfinished):
        await process.changes._renames.finish(one)


async def touched(process: Process, key: str) -> None:
    """Wait until a key counts as changed."""
    (renaming,) = process.changes._renames._unfinished
    while not renaming.touched.has(key):  # noqa: ASYNC110 - there is no event
        await trio.sleep(0.001)


async def chmod(process: Process, path: str, mode: int) -> None:
    mutations = process.operations.mutations
    assert mutations is not None
    await mutations.setattr((await process.node(path)).nodeid, NewAttributes(mode=mode))
    await process.writer.deferred.drain()


async def remove(process: Process, path: str) -> None:
    await process.unlink(path)


async def move_away(process: Process, path: str) -> None:
    await process.rename(path, "elsewhere")


async def remove_many(process: Process, path: str) -> None:
    """Where a program removes many files that is put on record, else."""
    mutations = process.operations.mutations
    assert mutations is not None
    for number in range(10):
        await process.save(f"other{number}", b"")
        await process.unlink(f"other{number}")
    process.writer.removals.note_allowed(path)
    parent = await process.node("a")
    answer = mutations.unlink(parent.nodeid, path[2:].encode(), process.caller())
    if answer is not None:
        await answer


@pytest.mark.parametrize("how", [remove, move_away, remove_many])
@states(
    "What this mount changes below the old or the new name of a directory while its rename is"
    " not finished stays as it was changed, whatever the daemon dies of meanwhile."
)
async def test_what_is_removed_while_it_is_copied_stays_removed(
    mount: MortalMount, how: Callable[[Process, str], Awaitable[None]]
) -> None:
    async with killed_while_copying(mount) as process:
        await how(process, "a/x")
    mount.store.objects.pop("elsewhere", None)
    async with mount.serving() as process:
        await finish(process)
    assert mount.store.contents() == {"b/y": b"y", "b/z": b"z"}


async def test_what_is_removed_while_the_rename_begins_stays_removed(mount: MortalMount) -> None:
    """Its DELETE is under way by then, and executed after it was copied."""
    stop, made = Stop(mount.store, "DELETE", "a/x"), Made(mount.store)
    async with killed(mount) as (process, nursery):
        await process.listing("a")
        nursery.start_soon(stop.then, process.rename, "a", "b")
        nursery.start_soon(stop.end_after, made, "b/x", "b/y", "b/z")
        await process.unlink("a/x")
    async with mount.serving() as process:
        await finish(process)
    assert mount.store.contents() == {"b/y": b"y", "b/z": b"z"}


@pytest.mark.parametrize("is_known", [True, False])
async def test_what_is_overwritten_while_it_is_copied_is_copied_again(
    mount: MortalMount, is_known: bool
) -> None:
    """The copy is of the old content, and younger than the new one."""
    async with killed_while_copying(mount) as process:
        if is_known:
            await overwrite(process, "a/x", b"2")
        else:
            mount.store.put("a/x", b"2")
        mount.store.put("b/x", b"x")
    async with mount.serving() as process:
        await finish(process)
    assert mount.store.contents() == {"b/x": b"2", "b/y": b"y", "b/z": b"z"}


async def test_what_is_removed_while_it_is_copied_again_leaves_no_older_copy(
    mount: MortalMount,
) -> None:
    async with killed_while_copying(mount) as process:
        await overwrite(process, "a/x", b"2")
    stop = Stop(mount.store, "COPY", "b/x")
    async with mount.serving() as process, trio.open_nursery() as nursery:
        nursery.start_soon(finish, process)
        await stop.reached.wait()
        await process.unlink("a/x")
        stop.go_on.set()
    assert mount.store.contents() == {"b/y": b"y", "b/z": b"z"}


async def test_a_mode_that_is_set_while_its_file_is_copied_goes_along(mount: MortalMount) -> None:
    async with killed_while_copying(mount) as process:
        await chmod(process, "a/x", 0o600)
        mount.store.put("b/x", b"x")
    async with mount.serving() as process:
        await finish(process)
    assert (mount.store.objects["b/x"].info.metadata or {})["mode"] == str(0o100600)


@pytest.mark.parametrize("path", ["", "/s"])
async def test_a_mode_that_is_set_of_a_directory_while_it_is_copied_goes_along(
    mount: MortalMount, path: str
) -> None:
    mount.store.put("a/s/")
    stop, made = Stop(mount.store, "COPY", "b/z"), Made(mount.store)
    async with mount.serving() as process, trio.open_nursery() as nursery:
        await process.listing("a")
        nursery.start_soon(process.rename, "a", "b")
        await made.wait("PUT", f"b{path}/")
        await stop.reached.wait()
        await chmod(process, f"a{path}", 0o700)
        stop.go_on.set()
    assert (mount.store.objects[f"b{path}/"].info.metadata or {})["mode"] == str(0o40700)
    assert not [key for key in mount.store.objects if key.startswith("a")]


@states(
    "What this mount changes below the old or the new name of a directory while its rename is"
    " not finished stays as it was changed, whatever the daemon dies of meanwhile."
)
async def test_what_is_changed_once_a_rename_took_place_stays(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the disk has the record of that."""
    has_switched = trio.Event()
    record = RenameJobs._record

    async def hang(self: RenameJobs, renaming: RenameJob, phase: Phase) -> None:
        if phase == Phase.DELETING:
            has_switched.set()
            await trio.sleep_forever()
        await record(self, renaming, phase)

    monkeypatch.setattr(RenameJobs, "_record", hang)
    async with killed(mount) as (process, nursery):
        await process.listing("a")
        nursery.start_soon(process.rename, "a", "b")
        await has_switched.wait()
        await overwrite(process, "b/x", b"newer")
        await process.unlink("b/y")
        await process.mkdir("a")
        await process.save("a/z", b"z")
    monkeypatch.undo()
    mount.store.put("a/y", b"of another node")
    async with mount.serving() as process:
        await finish(process)
    assert mount.store.contents() == {
        "a/y": b"of another node",
        "a/z": b"z",
        "b/x": b"newer",
        "b/z": b"z",
    }


@pytest.mark.parametrize("is_killed", [False, True])
@states(
    "What this mount changes below the old or the new name of a directory while its rename is"
    " not finished stays as it was changed, whatever the daemon dies of meanwhile."
)
async def test_what_is_written_under_the_new_name_is_not_replaced_by_a_later_try(
    mount: MortalMount, is_killed: bool
) -> None:
    """What is under the old name of that file stays as well."""
    async with killed_while_copying(mount):
        pass

    def fail(what: str, key: str) -> None:
        if (what, key) == ("COPY", "b/z"):
            raise StoreError("archived")

    mount.store.before = fail
    async with mount.serving() as process:
        with pytest.raises(StoreError):
            await finish(process)
        await overwrite(process, "b/x", b"newer")
        await process.unlink("b/y")
        with pytest.raises(StoreError):
            await finish(process)
        assert mount.store.contents() == {"a/x": b"x", "a/y": b"y", "a/z": b"z", "b/x": b"newer"}
        mount.store.before = lambda _what, _key: None
        if not is_killed:
            await finish(process)
    async with mount.serving() as process:
        await finish(process)
    assert mount.store.contents() == {"a/x": b"x", "a/y": b"y", "b/x": b"newer", "b/z": b"z"}


@states(
    "The rename of a directory fails with EEXIST if programs put files below its new name"
    " meanwhile."
)
async def test_files_that_are_made_under_the_new_name_end_a_rename(mount: MortalMount) -> None:
    stop = Stop(mount.store, "COPY", "b/z")
    async with mount.serving() as process, trio.open_nursery() as nursery:
        await process.listing()
        refused = trio.Event()

        async def rename() -> None:
            with pytest.raises(ExistsError):
                await process.rename("a", "b")
            refused.set()

        nursery.start_soon(rename)
        await stop.reached.wait()
        await process.mkdir("b")
        nursery.start_soon(process.save, "b/z", b"other")
        await touched(process, "b/z")
        await wait_all_tasks_blocked()
        assert "b/z" not in mount.store.objects, "it did not wait for the copy"
        stop.go_on.set()
        await refused.wait()
    assert mount.store.contents() == {"a/x": b"x", "a/y": b"y", "a/z": b"z", "b/z": b"other"}


@states(
    "The rename of a directory fails with EEXIST if programs put files below its new name"
    " meanwhile."
)
async def test_a_file_that_is_open_under_the_new_name_ends_a_rename(mount: MortalMount) -> None:
    stop = Stop(mount.store, "COPY", "b/z")
    async with mount.serving() as process, trio.open_nursery() as nursery:
        await process.listing()

        async def rename() -> None:
            with pytest.raises(ExistsError):
                await process.rename("a", "b")
            await process.close(fh)

        nursery.start_soon(rename)
        await stop.reached.wait()
        await process.mkdir("b")
        fh = await process.create("b/x", b"other")
        stop.go_on.set()
    assert mount.store.contents() == {"a/x": b"x", "a/y": b"y", "a/z": b"z", "b/x": b"other"}


async def test_a_file_that_is_open_under_the_new_name_replaces_none_in_a_later_try(
    mount: MortalMount,
) -> None:
    async with killed_while_copying(mount):
        pass
    mount.store.objects.pop("b/x")
    async with mount.serving() as process:
        await process.node("b")
        fh = await process.create("b/x", b"other")
        await process.create("b/new", b"")
        await finish(process)
        await process.close(fh)
        assert sorted(await process.listing("b")) == ["new", "x", "y", "z"]
    contents = {"a/x": b"x", "b/x": b"other", "b/y": b"y", "b/z": b"z"}
    assert mount.store.contents() == contents


@pytest.mark.parametrize("is_open", [False, True])
@states(
    "A path that is longer than a key may be (1,024 bytes) is ENAMETOOLONG for whoever makes it."
)
async def test_a_directory_whose_files_would_have_too_long_keys_is_not_renamed(
    mount: MortalMount, *, is_open: bool
) -> None:
    deep = "/".join(["d" * 255] * 3)
    mount.store.put(f"{deep}/")
    async with mount.serving() as process:
        if is_open:
            fh = await process.create("a/" + "n" * 255, b"open")
        else:
            mount.store.put("a/" + "n" * 255, b"open")
        left = mount.store.contents() | {"a/" + "n" * 255: b"open"}
        with pytest.raises(OSError, match="1,024") as caught:
            await process.rename("a", f"{deep}/b")
        assert caught.value.errno == errno.ENAMETOOLONG
        if is_open:
            await process.close(fh)
    assert mount.store.contents() == left


async def test_what_has_another_etag_is_not_copied_at_each_try(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what was uploaded in parts has: whether it is a copy can't be seen."""
    HeldCopies(mount.store).holds = False
    async with killed_while_copying(mount):
        pass

    def fail(what: str, key: str) -> None:
        if (what, key) == ("COPY", "b/z"):
            raise StoreError("archived")

    mount.store.before = fail
    monkeypatch.setattr(prefix_copy, "AT_ONCE", 1)  # in the order of their names
    async with mount.serving() as process:
        for _ in range(3):
            with pytest.raises(StoreError):
                await finish(process)
    assert mount.store.requests.count(("COPY", "b/x")) == 2


async def test_what_cannot_be_put_on_record_fails(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(what: str, key: str) -> None:
        if (what, key) == ("DELETED", "a/z"):
            raise UnreachableError(key)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    mount.store.before = fail
    async with mount.serving() as process:
        await process.rename("a", "b")
        monkeypatch.setattr(LineLog, "append", full)
        with pytest.raises(OSError, match=rf"\[Errno {errno.ENOSPC}\]"):
            await process.unlink("b/x")
        with pytest.raises(OSError, match=rf"\[Errno {errno.ENOSPC}\]"):
            await process.rename("b/y", "elsewhere")
        monkeypatch.undo()
        assert mount.store.contents() == {"a/z": b"z", "b/x": b"x", "b/y": b"y", "b/z": b"z"}


@pytest.mark.parametrize("is_killed", [False, True])
@states(
    "What this mount changes below the old or the new name of a directory while its rename is"
    " not finished stays as it was changed, whatever the daemon dies of meanwhile."
)
async def test_what_is_made_under_the_old_name_is_not_deleted_by_a_later_try(
    mount: MortalMount, is_killed: bool
) -> None:
    """It has the size of what is under the new one, or is the same, and is older."""

    def fail(what: str, key: str) -> None:
        if what == "DELETED" and key in ("a/y", "a/z"):
            raise UnreachableError(key)

    mount.store.before = fail
    async with killed(mount) as (process, _):
        await process.rename("a", "b")
        await process.mkdir("a")
        await process.save("a/x", b"2")
        await overwrite(process, "b/x", b"3")
        mount.store.put("a/z", b"z")
        mount.store.put("b/z", b"z")
        with pytest.raises(UnreachableError):
            await process.rename("b", "c")  # which has to wait
        if not is_killed:
            mount.store.before = lambda _what, _key: None
            await finish(process)
    if is_killed:
        async with mount.serving() as process:
            await finish(process)
    expected = {"a/x": b"2", "a/z": b"z", "b/x": b"3", "b/y": b"y", "b/z": b"z"}
    assert mount.store.contents() == expected
    assert "a/" in mount.store.objects


async def test_what_is_made_anew_while_the_old_is_deleted_stays(mount: MortalMount) -> None:
    """Also what is the same."""
    go_on, has_request = trio.Event(), trio.Event()
    delete_many = mount.store.delete_many

    async def held(*args: Any) -> Any:
        has_request.set()
        await go_on.wait()
        return await delete_many(*args)

    mount.store.delete_many = held  # type: ignore[method-assign, assignment]
    async with mount.serving() as process, trio.open_nursery() as nursery:
        await process.listing("a")
        nursery.start_soon(process.rename, "a", "b")
        await has_request.wait()
        await process.mkdir("a")
        await process.mkdir("a/sub")
        nursery.start_soon(process.save, "a/x", b"x")
        await touched(process, "a/x")
        go_on.set()
    assert set(mount.store.objects) == {"a/", "a/sub/", "a/x", "b/", "b/x", "b/y", "b/z"}


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_rename_that_is_undone_takes_nothing_that_is_wanted(
    mount: MortalMount, is_killed: bool
) -> None:
    """As when a program copies a/x once more, and then removes what it has under b/."""
    mount.store.put("a/w", b"w")

    def fail(what: str, key: str) -> None:
        if what == "DELETED" and key.startswith("b/"):
            raise UnreachableError(key)

    mount.store.before = fail
    stop, made = Stop(mount.store, "COPY", "b/z"), Made(mount.store)
    stop.error = UnreachableError("b/z")
    async with killed(mount) as (process, nursery):
        await process.listing("a")
        nursery.start_soon(stop.end_after, made, "b/w", "b/x", "b/y")
        with pytest.raises(UnreachableError):
            await process.rename("a", "b")
        await process.mkdir("b")
        await process.save("b/x", b"x")
        await process.unlink("a/x")
        await process.unlink("a/y")
        if not is_killed:
            mount.store.before = lambda _what, _key: None
            await finish(process)
    if is_killed:
        async with mount.serving() as process:
            await finish(process)
    assert mount.store.contents() == {"a/w": b"w", "a/z": b"z", "b/x": b"x", "b/y": b"y"}


@pytest.mark.parametrize("is_listed", [False, True])
async def test_what_is_looked_up_while_its_directory_is_renamed_goes_along(
    mount: MortalMount, is_listed: bool
) -> None:
    """Else what is opened next would be written under the old name."""
    stop = Stop(mount.store, "HEAD", "a/x")
    async with mount.serving() as process:
        await process.node("a")
        look = partial(process.listing, "a") if is_listed else partial(process.node, "a/x")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await stop.reached.wait()
            await process.rename("a", "b")
            directory = await process.node("b")
            stop.go_on.set()
        known = [inode.info.key for inode in (directory.children or {}).values() if inode.info]
        assert "b/x" in known
        assert not [key for key in known if key.startswith("a/")]


async def test_what_is_created_while_its_directory_is_renamed_goes_along(
    mount: MortalMount,
) -> None:
    """Also where the bucket decides first whether it is new."""
    stop, made = Stop(mount.store, "PUT", "a/new"), Made(mount.store)
    async with mount.serving(reserves_always=True) as process:
        mutations = process.operations.mutations
        assert mutations is not None
        parent = await process.node("a")
        flags = os.O_RDWR | os.O_EXCL

        async def answer_late() -> None:
            await made.wait("COPY", "b/x", "b/y", "b/z")
            await wait_all_tasks_blocked(0.05)  # the rename goes no further
            stop.go_on.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop.then, process.rename, "a", "b")
            nursery.start_soon(answer_late)
            answer = mutations.create(parent.nodeid, b"new", 0o100644, flags, process.caller())
            assert not isinstance(answer, tuple)
            _, opened = await answer
        await process.write(opened.fh, 0, b"new")
        await process.close(opened.fh)
    assert mount.store.contents() == {"b/new": b"new", "b/x": b"x", "b/y": b"y", "b/z": b"z"}


async def test_what_could_not_be_copied_again_is_copied_by_the_next_try(tmp_path: Path) -> None:
    """Its attributes were changed within the second in which it had been copied before."""
    store = MemoryStore()
    store.put("a/x", b"x")
    touched = KeysTouchedMeanwhile(tmp_path / "1.touched", "a/", "b/", Phase.COPYING)
    copies = PrefixCopy(store, touched, -1, lambda _: False, is_strict=False)
    await copies.copy_all()
    touched.note("a/x")

    def refuse(what: str, _key: str) -> None:
        if what == "COPY":
            raise UnreachableError("not now")

    store.before = refuse
    with pytest.raises(UnreachableError):
        await copies.copy_all()
    store.before = lambda _what, _key: None
    count = store.count("COPY")
    await copies.copy_all()
    assert store.count("COPY") == count + 1


async def test_a_rename_that_takes_long_takes_along_what_was_changed_at_its_beginning(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_changes, "KEPT_S", -1.0)  # the copies take longer than that
    mount.store.put("other/f", b"1")
    stop, made = Stop(mount.store, "COPY", "b/z"), Made(mount.store)
    async with mount.serving() as process:
        await process.listing("a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.rename, "a", "b")
            await made.wait("COPY", "b/x", "b/y")
            await process.unlink("a/x")
            await process.save("a/new", b"new")
            await process.unlink("other/f")  # all earlier changes are forgotten
            stop.go_on.set()
        assert await process.listing("b") == ["new", "y", "z"]
    assert [key for key in mount.store.objects if key[0] in "ab"] == ["b/", "b/y", "b/z", "b/new"]
