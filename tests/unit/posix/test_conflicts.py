"""Contents that are kept apart, uploads that wait for closes, and tasks that end by themselves."""

import errno
import os
import stat
import time
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from fusefs.posix.tasks import run_uncancelled
from fusefs.store.errors import ExistsError
from tests.support.semantics import states
from tests.support.survival.mortal_mount import LOCAL, MortalMount, Process, answered


async def create(process: Process, name: str, data: bytes) -> int:
    """A new file that is created with O_EXCL and not reserved."""
    process.writer.exclusive.made("")
    root, flags = process.operations.inodes.root, os.O_RDWR | os.O_EXCL
    await process.listing()
    made = process.writer.create(root, name, stat.S_IFREG | 0o644, flags, process.caller())
    _, opened = await answered(made)
    await process.write(opened.fh, 0, data)
    return opened.fh


async def lose(process: Process, fh: int) -> None:
    with pytest.raises(OSError, match="another node") as caught:
        await process.close(fh)
    assert caught.value.errno == errno.EEXIST


async def test_a_content_that_is_kept_apart_has_a_name_that_is_shown(process: Process) -> None:
    """The names of files have 255 bytes at most."""
    name = "ä" * 125
    fh = await create(process, name, b"ours")
    process.store.put(name, b"theirs")
    await lose(process, fh)
    theirs, ours = sorted(await process.listing())
    if theirs != name:
        theirs, ours = ours, theirs
    assert ours.startswith("ää")
    assert ".conflict-" in ours
    assert await process.load(ours) == b"ours"
    assert process.store.contents() == {name: b"theirs", ours: b"ours"}


async def test_contents_of_one_machine_and_one_second_are_kept_apart_from_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many mounts, as the pods of a training job have."""
    monkeypatch.setattr(time, "strftime", lambda *_: "20000101T000000")
    first, second = MortalMount(tmp_path / "1"), MortalMount(tmp_path / "2")
    second.store = first.store
    async with first.serving() as one, second.serving() as two:
        handles = [await create(one, "file", b"1"), await create(two, "file", b"2")]
        first.store.put("file", b"theirs")
        await lose(one, handles[0])
        await lose(two, handles[1])
    assert sorted(first.store.contents().values()) == [b"1", b"2", b"theirs"]


@states("Where the store has conditional copies, RENAME_NOREPLACE replaces no other node's file.")
async def test_what_is_not_uploaded_yet_is_renamed_over_no_other_nodes_file(
    mount: MortalMount,
) -> None:
    async with mount.serving(durability=LOCAL) as process:
        await process.listing()
        await process.save("tmp", b"ours")
        (staged,) = process.writer.staging
        mount.store.put("file", b"theirs")
        with pytest.raises(ExistsError):
            await process.rename("tmp", "file", flags=1)
        await process.rename("tmp", "other", flags=1)
        assert mount.store.contents() == {"file": b"theirs", "other": b"ours"}
        assert not staged.is_dirty


async def test_what_no_task_waits_for_any_more_is_done_to_its_end() -> None:
    gate = trio.Event()
    done: list[str] = []

    async def work() -> str:
        await gate.wait()
        done.append("worked")
        return "result"

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(0) as scope:
            await run_uncancelled(nursery, work(), lambda: done.append("unseen"), done.append)
        assert scope.cancelled_caught
        assert done == []
        gate.set()
    assert done == ["worked", "unseen", "result"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), ZeroDivisionError()])
async def test_a_failure_ends_who_waits_for_it_and_nothing_else(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    unseen: list[int] = []

    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise error

    async with trio.open_nursery() as nursery:
        with pytest.raises(type(error)):
            await run_uncancelled(nursery, fail(), lambda: unseen.append(1))
        with trio.move_on_after(0):
            await run_uncancelled(nursery, fail(), lambda: unseen.append(2))
    assert unseen == [2]
    assert ("Traceback" in caplog.text) == isinstance(error, ZeroDivisionError)
