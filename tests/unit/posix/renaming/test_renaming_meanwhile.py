"""Changes beside the rename of a directory that is not finished: they wait for its end.

The rename is gone on with later: by the next process after a kill, or by the same
one where S3 refused something.
"""

import errno
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fusefs.store.errors import StoreError, UnreachableError
from tests.support.memory_store import HeldCopies, Stop, failing
from tests.support.semantics import states
from tests.support.survival.mortal_mount import DiedError, MortalMount, Process


@pytest.fixture
def mount(mount: MortalMount) -> MortalMount:
    mount.store.put("a/")
    for name in "xyz":
        mount.store.put(f"a/{name}", name.encode())
    return mount


@asynccontextmanager
async def killed(mount: MortalMount) -> AsyncIterator[tuple[Process, trio.Nursery]]:
    """A process that is killed at the end, with the tasks in the nursery."""
    async with mount.killed() as process, trio.open_nursery() as nursery:
        yield process, nursery
        raise DiedError
    mount.store.pause = trio.lowlevel.checkpoint
    mount.store.heal()


async def finished(process: Process) -> None:
    """Wait until no rename is on record."""
    while process.changes.renames.describe():  # noqa: ASYNC110 - there is no event
        await trio.sleep(0.001)


async def chmod(process: Process, path: str, mode: int) -> None:
    await process.set_attributes(path, mode=mode)
    await process.writer.deferred.drain()


XYZ = {"b/x": b"x", "b/y": b"y", "b/z": b"z"}
YZ = {"b/y": b"y", "b/z": b"z"}
Act = Callable[[Process, str], Awaitable[None]]
# Changes below a directory of some name, and what there is once they are done.
CHANGES: dict[str, tuple[Act, dict[str, bytes]]] = {
    "create": (lambda process, at: process.save(f"{at}/new", b"new"), XYZ | {"b/new": b"new"}),
    "close": (lambda process, at: process.overwrite(f"{at}/x", b"2"), XYZ | {"b/x": b"2"}),
    "unlink": (lambda process, at: process.unlink(f"{at}/x"), YZ),
    "rename": (lambda process, at: process.rename(f"{at}/x", "c"), YZ | {"c": b"x"}),
    "chmod": (lambda process, at: chmod(process, f"{at}/x", 0o600), XYZ),
    "chmod of the directory": (lambda process, at: chmod(process, at, 0o700), XYZ),
    "the name itself": (lambda process, _: process.mkdir("a"), XYZ),
}
MODES = {"chmod": ("b/x", 0o100600), "chmod of the directory": ("b/", 0o40700)}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("what", "key", "name"), [("COPY", "b/z", "a"), ("DELETE", "a/", "a"), ("DELETES", "", "b")]
)
async def test_a_change_below_a_directory_waits_for_its_rename(
    process: Process, change: str, what: str, key: str, name: str
) -> None:
    stop = Stop(process.store, what, key)
    act, expected = CHANGES[change]
    await process.listing("a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.rename, "a", "b")
        await stop.reached.wait()
        before = process.store.contents()
        nursery.start_soon(act, process, name)
        await wait_all_tasks_blocked()
        assert process.store.contents() == before
        assert await process.load(f"{name}/y") == b"y"
        assert await process.listing(name) == ["x", "y", "z"]
        await process.mkdir("other")  # does not wait
        (state,) = process.changes.renames.describe()
        waiting = "a" if change == "the name itself" else name
        assert (state["waiting"], state["waiting_keys"][0][0]) == (1, waiting)
        stop.go_on.set()
    assert process.store.contents() == expected
    for made, mode in [MODES[change]] if change in MODES else []:
        assert process.store.metadata(made)["mode"] == str(mode)


async def test_what_is_staged_is_uploaded_by_the_next_process_after_the_rename(
    mount: MortalMount,
) -> None:
    """Also where all is copied: else its old object could not be told from another client's."""
    stop = Stop(mount.store, "DELETES", "")
    async with killed(mount) as (process, nursery):
        await process.listing("a")
        fh = await process.open("a/x", os.O_RDWR)
        await process.write(fh, 0, b"2")
        nursery.start_soon(process.rename, "a", "b")
        await stop.reached.wait()
        nursery.start_soon(process.close, fh)
        await wait_all_tasks_blocked()
        assert mount.store.contents()["b/x"] == b"x"
    async with mount.serving() as process:
        await process.close(fh)
        await finished(process)
    assert mount.store.contents() == XYZ | {"b/x": b"2"}


@pytest.mark.parametrize(("what", "key"), [("DELETE", "a/x"), ("PUT", "a/x"), ("PUT", "a/new")])
async def test_a_rename_waits_for_what_is_under_way(process: Process, what: str, key: str) -> None:
    """That does not fail with the rename. The bucket decides first whether a new file is new."""
    process.store.before = failing(UnreachableError("a/z"), ("DELETED", "a/z"))
    stop = Stop(process.store, what, key)
    unlink, cut = process.unlink, partial(process.set_attributes, size=0)
    create = partial(process.operations.mutations.mknod, (await process.node("a")).nodeid, b"new")
    await process.listing("a")
    async with trio.open_nursery() as nursery:
        if key == "a/new":
            nursery.start_soon(create, stat.S_IFREG | 0o644, process.caller())
        else:
            nursery.start_soon(unlink if what == "DELETE" else cut, key)
        await stop.reached.wait()
        nursery.start_soon(process.rename, "a", "b")
        await wait_all_tasks_blocked()
        assert process.store.count("COPY") == 0
        stop.go_on.set()
    left = {"a/new": XYZ | {"b/new": b""}, "a/x": YZ if what == "DELETE" else XYZ | {"b/x": b""}}
    assert process.store.contents() == left[key] | {"a/z": b"z"}


@states("Renames of directories that overlap are made one after the other, in their order.")
async def test_renames_that_overlap_are_made_in_their_order(process: Process) -> None:
    """Each finds its directory where the one before has put it."""
    process.store.put("a/s/w", b"w")
    stop = Stop(process.store, "COPY", "a/t/w")
    await process.listing("a")
    directory = await process.node("a")
    rename = process.changes.rename
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.rename, "a/s", "a/t")
        await stop.reached.wait()
        nursery.start_soon(process.rename, "a", "b")
        await wait_all_tasks_blocked()
        names = (directory, "x"), (directory, "v")
        nursery.start_soon(rename, *names, 0, process.caller())
        await wait_all_tasks_blocked()
        assert process.changes.renames.describe()[0]["waiting_keys"] == ["a"]
        stop.go_on.set()
    assert process.store.contents() == {"b/t/w": b"w", "b/v": b"x", "b/y": b"y", "b/z": b"z"}


@states(
    "A change that waits for a rename which the bucket refuses to finish fails with the bucket's"
    " error; the rename is tried again every five seconds, and for each later change."
)
async def test_what_waits_for_a_rename_that_is_refused_fails_with_its_error(
    process: Process,
) -> None:
    process.store.before = failing(UnreachableError("a/z"), ("DELETED", "a/z"))
    directory, create = await process.node("a"), process.operations.mutations.create
    begun = create(directory.nodeid, b"lock", 0o100644, os.O_RDWR | os.O_EXCL, process.caller())
    await process.rename("a", "b")
    with pytest.raises(UnreachableError, match="a/z"):
        await begun  # type: ignore[misc]
    fh = await process.open("b/x", os.O_RDWR)
    await process.write(fh, 0, b"2")
    for change, *names in (
        (process.unlink, "b/y"),
        (process.mkdir, "a"),
        (process.rename, "b", "c"),
        (process.close, fh),
    ):
        with pytest.raises((UnreachableError, OSError), match="a/z"):
            await change(*names)
    assert process.store.contents() == XYZ | {"a/z": b"z"}
    process.store.heal()
    await process.unlink("b/y")  # which has it tried again
    await process.writer.uploads.wait((await process.node("b/x")).staged)  # type: ignore[arg-type]
    assert process.store.contents() == {"b/x": b"2", "b/z": b"z"}


async def test_what_another_client_replaces_while_it_is_copied_is_copied_again(
    mount: MortalMount,
) -> None:
    """The copy is of the old content, and younger than the new one."""
    stop = Stop(mount.store, "COPY", "b/z")
    async with killed(mount) as (process, nursery):
        await process.listing("a")
        nursery.start_soon(process.rename, "a", "b")
        await stop.reached.wait()
        await wait_all_tasks_blocked()
        mount.store.put("a/x", b"2")
        mount.store.put("b/x", b"x")
    async with mount.serving() as process:
        await finished(process)
    assert mount.store.contents() == XYZ | {"b/x": b"2"}


async def test_the_copies_of_all_processes_are_removed_if_the_last_one_fails(
    mount: MortalMount,
) -> None:
    """They have ETags of their own, as those of objects in parts; the marker comes back."""
    HeldCopies(mount.store).holds = False
    stop = Stop(mount.store, "DELETE", "a/")
    async with killed(mount) as (process, nursery):
        await process.listing("a")
        nursery.start_soon(process.rename, "a", "b")
        await stop.reached.wait()
    del mount.store.objects["a/"]
    mount.store.before = failing(StoreError("archived"), ("COPY", "b/z"))
    async with mount.serving() as process:
        await finished(process)
        assert await process.listing("a") == ["x", "y", "z"]
        await process.unlink("a/x")
    assert set(mount.store.objects) == {"a/", "a/y", "a/z"}


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_directory_whose_files_would_have_too_long_keys_is_not_renamed(
    process: Process, *, is_open: bool
) -> None:
    deep = "/".join(["d" * 255] * 3)
    process.store.put(f"{deep}/")
    if is_open:
        fh = await process.create("a/" + "n" * 255, b"open")
    else:
        process.store.put("a/" + "n" * 255, b"open")
    left = process.store.contents() | {"a/" + "n" * 255: b"open"}
    with pytest.raises(OSError, match="1,024") as caught:
        await process.rename("a", f"{deep}/b")
    assert caught.value.errno == errno.ENAMETOOLONG
    if is_open:
        await process.close(fh)
    assert process.store.contents() == left


@pytest.mark.parametrize("is_answered_during_the_copies", [False, True])
@pytest.mark.parametrize("act", ["listing", "node", "chmod"])
async def test_what_is_looked_up_while_its_directory_is_renamed_goes_along(
    process: Process, act: str, is_answered_during_the_copies: bool
) -> None:
    """Else what is opened or changed next would be written under the old name."""
    process.store.put("a/x", b"x", uid="7")
    stop = Stop(process.store, "HEAD", "a/x")
    directory = await process.node("a")
    look = partial(process.listing, "a") if act == "listing" else partial(process.node, "a/x")
    if act == "chmod":
        info = process.store.objects["a/x"].info
        inode = process.operations.inodes.resolve(directory, "x", info)
        look = partial(process.set_attributes, inode, mode=0o600)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await stop.reached.wait()
        copy = Stop(process.store, "COPY", "b/z")
        nursery.start_soon(process.rename, "a", "b")
        await copy.reached.wait()
        if is_answered_during_the_copies:
            stop.go_on.set()
            await wait_all_tasks_blocked()
        copy.go_on.set()
        await finished(process)
        stop.go_on.set()
    assert (await process.stat(await process.node("b/x"))).uid == 7
    known = [inode.info.key for inode in (directory.children or {}).values() if inode.info]
    assert {key[:2] for key in known} == {"b/"}
    await process.writer.deferred.drain()
    there = process.store.metadata("b/x")
    assert (there["uid"], there.get("mode")) == ("7", str(0o100600) if act == "chmod" else None)
