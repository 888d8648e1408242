"""Renames of directories and files: what goes along, what is undone, what is gone on with."""

import errno
import os
import stat
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fusefs.daemon import status
from fusefs.linux import files
from fusefs.posix.late.request_log import DELETE, Change
from fusefs.posix.late.uncertain_keys import UncertainKeys
from fusefs.store.errors import AccessDeniedError, ExistsError, UnreachableError, UnsupportedError
from fusefs.store.interface import IF_ABSENT, ObjectInfo, Write
from tests.support.memory_store import MemoryStore, Stop, failing
from tests.support.semantics import states
from tests.support.survival.fate import Fate
from tests.support.survival.mortal_mount import MortalMount, Process
from tests.unit.posix.renaming.test_renaming_meanwhile import finished

NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4


def fill(store: MemoryStore, prefix: str, count: int = 5) -> dict[str, bytes]:
    """Put a tree below a prefix; returns what is in it, by path in it."""
    store.put(prefix, mode="16877")
    store.put(prefix + "sub/")
    tree = {f"{number}": b"%d" % number for number in range(count)} | {"sub/x": b"x"}
    for path, data in tree.items():
        store.put(prefix + path, data, mine="kept")
    return tree


def below(store: MemoryStore, prefix: str) -> dict[str, bytes]:
    """The files below a prefix, by path in it."""
    found = store.contents().items()
    return {key[len(prefix) :]: data for key, data in found if key.startswith(prefix)}


async def test_a_directory_takes_all_along(mount: MortalMount) -> None:
    tree = fill(mount.store, "old/", 30)
    mount.store.page_size = 7
    async with mount.serving() as process:
        assert await process.load("old/3") == b"3"
        await process.rename("old", "new")
        assert below(mount.store, "new/") == tree
        assert not [key for key in mount.store.objects if key.startswith("old/")]
        assert mount.store.metadata("new/") == {"mode": "16877"}
        assert mount.store.metadata("new/4")["mine"] == "kept"
        assert await process.listing() == ["new"]
        assert sorted(await process.listing("new")) == sorted({*tree, "sub"} - {"sub/x"})
        assert await process.load("new/3") == b"3"
        assert await process.load("new/sub/x") == b"x"
        assert process.changes.renames.describe() == []
    assert list((mount.directory / "renames").iterdir()) == []


@states("A renamed file stays as old as it is.")
async def test_a_file_stays_as_old_as_it_is(mount: MortalMount) -> None:
    """Also in the bucket, where a copy is new."""
    mount.store.put("old/plain", b"1")
    mount.store.put("old/dated", b"2", mtime="12.5")
    age = mount.store.objects["old/plain"].info.mtime_ns
    async with mount.serving() as process:
        shown = process.operations.attributes
        await process.node("old/plain")
        await process.rename("old", "new")
        assert shown(await process.node("new/plain")).mtime_ns == age
        await process.rename("new/plain", "moved")
        assert shown(await process.node("moved")).mtime_ns == age
    mount.reboot()
    async with mount.serving() as process:
        assert process.operations.attributes(await process.node("moved")).mtime_ns == age
        node = await process.node("new/dated")
        assert process.operations.attributes(node).mtime_ns == 12_500_000_000


@states("Files that are open, also for writing, go on under the new name.")
async def test_open_files_go_on_under_the_new_name(process: Process) -> None:
    """Also one of which only the first bytes are there."""
    data = os.urandom(4 << 20)
    process.store.put("old/big", data)
    process.store.put("old/log", b"one")
    fh, log = await process.open("old/big"), await process.open("old/log", os.O_RDWR)
    await process.write(log, 3, b"two")
    await process.rename("old", "new")
    await process.write(log, 6, b"three")
    assert await process.load("new/log") == b"onetwothree"
    await process.close(log)
    assert process.store.contents() == {"new/big": data, "new/log": b"onetwothree"}
    assert await process.read(fh, 3 << 20, 100) == data[3 << 20 :][:100]
    await process.rename("new/big", "bigger")
    assert await process.read(fh, 2 << 20, 100) == data[2 << 20 :][:100]
    again = await process.open("bigger")
    assert await process.read(again, 0, 100) == data[:100]


async def test_an_overwritten_file_that_is_put_under_its_new_name_has_its_new_content(
    process: Process,
) -> None:
    process.store.put("a.tmp", b"old")
    assert await process.load("a.tmp") == b"old"
    fh, node = await process.open("a.tmp"), await process.node("a.tmp")
    process.operations.inodes.mark_replaced(node)  # as a later open by passthrough does
    await process.overwrite("a.tmp", b"newer")
    await process.rename("a.tmp", "b")
    assert process.store.contents() == {"b": b"newer"}
    assert await process.load("b") == b"newer"
    assert node.info is not None
    assert (node.info.size, await process.read(fh)) == (3, b"old")


@states("If the rename of a directory fails its copies are removed.")
@pytest.mark.parametrize("error", [UnreachableError("new/4"), OSError(errno.ENOSPC, "full")])
async def test_copies_that_cannot_be_made_are_taken_back(process: Process, error: OSError) -> None:
    """Also where the local disk fails: the removal of what had the name stays on record."""
    tree = fill(process.store, "old/")
    process.store.put("new/", mode="16832")
    process.store.before = failing(error, ("COPY", "new/4"))
    with pytest.raises(type(error)):
        await process.rename("old", "new")
    assert below(process.store, "old/") == tree
    assert [key for key in process.store.objects if key.startswith("new/")] == ["new/"]
    assert sorted(await process.listing()) == ["new", "old"]
    assert await process.listing("new") == []
    assert process.changes.renames.describe() == []
    process.store.heal()
    await process.rename("old", "new")
    assert below(process.store, "new/") == tree


@pytest.mark.parametrize("error", [UnreachableError("new/4"), AccessDeniedError("new/4")])
async def test_copies_whose_answers_are_not_there_are_taken_back(
    process: Process, error: UnreachableError | AccessDeniedError
) -> None:
    """That of the request that fails, be it refused after that, and of those under way then."""
    error.may_be_done = isinstance(error, AccessDeniedError)
    tree = fill(process.store, "old/")
    copy, is_failing = process.store.copy, trio.Event()

    async def lose(source: ObjectInfo, key: str, write: Write) -> ObjectInfo:
        made = await copy(source, key, write)
        if key == "new/4":
            is_failing.set()
            raise error
        if key == "new/1":
            await is_failing.wait()
            await wait_all_tasks_blocked()
        return made

    process.store.copy = lose  # type: ignore[method-assign, assignment]
    with pytest.raises(type(error)):
        await process.rename("old", "new")
    assert below(process.store, "old/") == tree
    assert [key for key in process.store.objects if key.startswith("new")] == []


@pytest.mark.parametrize("content", [b"", b"of an object that is no marker"])
async def test_an_empty_directory_stays_whose_rename_fails(
    process: Process, content: bytes
) -> None:
    """Its marker was deleted, but there was no answer."""
    process.store.put("old/", content, mode="16832")
    process.store.after = failing(UnreachableError("old/"), ("DELETE", "old/"))
    with pytest.raises(UnreachableError):
        await process.rename("old", "new")
    assert await process.listing() == ["old"]
    assert list(process.store.objects) == ["old/"]
    assert process.store.objects["old/"].data == content
    assert process.store.metadata("old/")["mode"] == "16832"


async def test_markers_and_files_take_along_what_can_be_sent_of_their_metadata(
    process: Process,
) -> None:
    """Others write what can't."""
    process.store.put("old/", mode="16832", empty="", author="\u00e9")
    process.store.put("old/f", b"f", **{"": "no name", "a@b": "no token", "kept": "v"})
    await process.set_attributes("old/f", mode=0o600)
    await process.rename("old", "new")
    assert process.store.contents() == {"new/f": b"f"}
    assert process.store.metadata("new/f")["kept"] == "v"
    assert process.store.metadata("new/") == {"mode": "16832"}


async def test_a_fault_in_one_rename_ends_no_mount(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process would meet it as well; other renames go on."""
    fill(process.store, "old/", 2)
    fill(process.store, "other/", 2)
    refused = ("DELETED", "old/1"), ("DELETED", "other/1")
    process.store.before = failing(UnreachableError("1"), *refused)
    await process.rename("old", "new")
    await process.rename("other", "another")
    process.store.before = failing(LookupError("old/"), ("LIST", "old/"))
    process.changes.renames.pending("", hurry=True)
    await wait_all_tasks_blocked(0.01)
    (state,) = process.changes.renames.describe()
    assert state["from"] == "old/"
    (pending,) = process.changes.renames.pending("")
    assert "LookupError" in pending["error"]
    process.store.heal()
    process.changes.renames.pending("", hurry=True)
    await wait_all_tasks_blocked(0.01)
    assert process.changes.renames.describe() == []


async def test_a_bucket_that_lets_nothing_be_deleted_keeps_its_names(process: Process) -> None:
    tree = fill(process.store, "old/")
    refused = ("DELETE", "old/"), ("DELETE", "old/1")
    process.store.before = failing(AccessDeniedError("old"), *refused)
    assert await process.load("old/1") == b"1"
    with pytest.raises(AccessDeniedError):
        await process.rename("old", "new")
    with pytest.raises(AccessDeniedError):
        await process.rename("old/1", "one")
    assert await process.load("old/1") == b"1"
    assert process.store.count("GET") == 1  # what was cached still is
    assert below(process.store, "old/") == tree
    assert process.store.contents().keys() == {f"old/{path}" for path in tree}


async def test_what_cannot_be_deleted_yet_is_deleted_later(process: Process) -> None:
    tree = fill(process.store, "old/")
    process.store.before = failing(UnreachableError("old/2"), ("DELETED", "old/2"))
    await process.rename("old", "new")
    assert below(process.store, "old/") == {"2": b"2"}
    assert await process.listing() == ["new"]
    (state,) = process.changes.renames.describe()
    assert (state["phase"], state["copied"], state["deleted"]) == ("deleting", 8, 7)
    # What another client makes under the old name stays.
    process.store.put("old/1", b"of another node")
    process.store.heal()
    process.changes.renames.pending("", hurry=True)
    await process.mkdir("old")  # which waits
    assert below(process.store, "new/") == tree
    assert below(process.store, "old/") == {"1": b"of another node"}


async def test_a_rename_that_is_not_finished_is_pending(mount: MortalMount) -> None:
    fill(mount.store, "old/")
    mount.store.before = failing(UnreachableError("old/2"), ("DELETED", "old/2"))
    async with mount.serving() as process, trio.open_nursery() as nursery:
        await process.rename("old", "new")
        mutations = process.operations.mutations
        assert mutations is not None
        assert status.sync(mutations, "other", is_first=True)["pending"] == []
        for key in ("", "old", "new/sub/x"):
            (pending,) = status.sync(mutations, key, is_first=False)["pending"]
            assert (pending["key"], pending["state"]) == ("old/", "being renamed to new/")
            assert "old/2" in pending["error"]
        answer = status.sync(mutations, "", is_first=True)
        assert (answer["pending"][0]["error"], answer["under_way"]) == (None, 1)
        nursery.start_soon(process.changes.run)
        await wait_all_tasks_blocked(0.01)
        answer = status.sync(mutations, "", is_first=False)
        assert (len(answer["pending"]), answer["under_way"]) == (1, 0)
        mount.store.heal()
        status.sync(mutations, "", is_first=True)
        await wait_all_tasks_blocked(0.01)
        assert status.sync(mutations, "", is_first=False)["pending"] == []
        assert below(mount.store, "old/") == {}
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (None, "damaged"),
        (b"{", "damaged"),
        (b"[]", "damaged"),
        (b"\xff", "damaged"),
        (b'{"format": 2, "phase": ""}', "damaged"),
        (b'{"source": "", "phase": "copying"}', "of another version of fusefs"),
        (
            b'{"format": 2, "mount": "1", "until_ns": null, "is_switching": false,'
            b' "source": "other", "old": "old/", "new": "new/", "phase": "copying",'
            b' "has_replaced": false}',
            "a rename of other is not finished",
        ),
    ],
)
async def test_a_record_that_cannot_be_used_ends_no_mount(
    mount: MortalMount, record: bytes | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = mount.directory / "renames" / "1.json"
    path.parent.mkdir()
    if record is None:
        path.mkdir()
    else:
        path.write_bytes(record)
    async with mount.serving() as process:
        assert process.changes.renames.describe() == []
    assert [why in line for line in caplog.messages] == [True]
    assert path.is_dir() or path.read_bytes() == record


@pytest.mark.parametrize("step", ["replace", "sync_directory"])
async def test_a_disk_that_is_read_only_blocks_nothing(
    process: Process, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """What is on record is done: the next process would do it as well."""
    fill(process.store, "old/", 1)
    refuse = Mock(side_effect=OSError(errno.EROFS, "read-only"))
    monkeypatch.setattr(files, step, refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    if step == "replace":
        with pytest.raises(OSError, match="read-only"):
            await process.rename("old", "new")
        with trio.fail_after(5):
            await process.mkdir("old/made")
    else:
        await process.rename("old", "new")
        assert await process.listing() == ["new"]


async def test_the_next_mount_finishes_what_a_dead_machine_had_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fate = Fate(monkeypatch)
    for mount in fate.mounts(tmp_path):
        tree = fill(mount.store, "old/", 3)
        with fate.process():
            async with mount.serving() as process:
                await process.node("old/1")
                fate.count()
                await process.rename("old", "new")
        assert {**below(mount.store, "old/"), **below(mount.store, "new/")} == tree
        is_on_record = list((mount.directory / "renames").glob("*.json"))
        mount.reboot()
        mount.store.requests.clear()
        async with mount.serving() as process:
            await finished(process)
            if is_on_record:
                assert below(mount.store, "new/") == tree
                assert await process.listing() == ["new"]
                assert await process.load("new/sub/x") == b"x"


@pytest.mark.parametrize("flags", [EXCHANGE, WHITEOUT, NOREPLACE | EXCHANGE])
@states("RENAME_EXCHANGE is EINVAL: three copies are not one step.")
async def test_what_is_not_one_step_is_refused(process: Process, flags: int) -> None:
    process.store.put("a", b"a")
    process.store.put("b", b"b")
    with pytest.raises(OSError, match=rf"\[Errno {errno.EINVAL}\]"):
        await process.rename("a", "b", flags=flags)
    with pytest.raises(FileExistsError):
        await process.rename("a", "b", flags=NOREPLACE)
    await process.rename("a", "c", flags=NOREPLACE)
    assert process.store.contents() == {"b": b"b", "c": b"a"}


@pytest.mark.parametrize("is_linked", [False, True])
@states("Where the store knows conditional writes, a symbolic link replaces no other node's file.")
async def test_what_another_node_has_just_made_is_not_replaced(
    process: Process, *, is_linked: bool
) -> None:
    """By a link, which programs use as a lock, or a rename that the program so wants, as `mv`."""
    process.store.put("a", b"a")
    assert await process.listing() == ["a"]
    process.store.put("b", b"of another node")
    make = process.symlink("b", b"") if is_linked else process.rename("a", "b", flags=NOREPLACE)
    with pytest.raises(ExistsError):
        await make
    assert process.store.contents() == {"a": b"a", "b": b"of another node"}
    assert await process.listing() == ["a", "b"]
    await process.rename("a", "b")
    assert process.store.contents() == {"b": b"a"}


async def test_a_link_is_made_without_conditions_and_temporary_files(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMPDIR may be full, or on the mount."""
    monkeypatch.setattr(tempfile, "tempdir", "/missing")
    put_file = process.store.put_file

    async def put_without(key: str, fd: int, size: int, write: Write) -> ObjectInfo:
        if write.condition == IF_ABSENT:
            raise UnsupportedError("If-None-Match")
        return await put_file(key, fd, size, write)

    process.store.put_file = put_without  # type: ignore[method-assign, assignment]
    await process.symlink("link", b"target")
    assert process.store.contents() == {"link": b"target"}


@pytest.mark.parametrize("made", ["b", "b/x"])
@states("A directory that must replace nothing is renamed after a look into the bucket.")
async def test_a_directory_takes_no_name_that_another_node_has_just_taken(
    process: Process, made: str
) -> None:
    fill(process.store, "a/", 1)
    assert await process.listing() == ["a"]
    process.store.put(made, b"of another node")
    with pytest.raises(FileExistsError):
        await process.rename("a", "b", flags=NOREPLACE)
    assert await process.listing() == ["a", "b"]
    await process.rename("a", "c", flags=NOREPLACE)
    assert await process.listing() == ["b", "c"]


@pytest.mark.parametrize(("failed", "unseen"), [("COPY", "b"), ("DELETE", "a")])
async def test_a_target_that_is_written_is_lost_only_when_the_rename_succeeds(
    process: Process, monkeypatch: pytest.MonkeyPatch, failed: str, unseen: str
) -> None:
    """A rename that has taken the retry time hardly waits to see what the bucket has done."""
    monkeypatch.setattr("fusefs.posix.namespace.rename.LOOK_S", 0.01)
    process.store.put("a", b"a")
    await process.node("a")
    fh = await process.create("b", b"precious")
    error = UnreachableError(failed)
    error.may_be_done = True
    process.store.before = failing(error, failed)
    stop = Stop(process.store, "HEAD", unseen)
    with pytest.raises(UnreachableError, match=failed), trio.fail_after(5):
        await process.rename("a", "b")
    stop.go_on.set()
    process.store.heal()
    assert await process.load("b") == b"precious"
    await process.close(fh)
    assert process.store.contents() == {"a": b"a", "b": b"precious"}
    await process.rename("a", "b")
    assert process.store.contents() == {"b": b"a"}


async def test_removing_a_tree_looks_once_into_each_directory(process: Process) -> None:
    fill(process.store, "tree/", 4)
    await process.listing()
    await process.listing("tree")
    await process.listing("tree/sub")
    process.store.requests.clear()
    for name in ("0", "1", "2", "3", "sub/x"):
        await process.unlink(f"tree/{name}")
    await process.rmdir("tree/sub")
    await process.rmdir("tree")
    assert process.store.objects == {}
    # Besides: does the directory above have a marker of its own?
    assert process.store.count("LIST") <= 2 + 2


@pytest.mark.parametrize("is_replacing", [False, True])
async def test_a_rename_that_may_delete_nothing_shows_both_files(
    process: Process, *, is_replacing: bool
) -> None:
    """That under the old name gets the mode that it was given before."""
    if is_replacing:
        process.store.put("new", b"replaced")
    fh = await process.create("old", b"moved")
    await process.writer.flusher.fsync(fh)
    await process.set_attributes("old", mode=0o600)
    refused = ("DELETE", "old"), ("DELETE", "new")
    process.store.before = failing(UnreachableError("old"), *refused)
    assert not is_replacing or await process.load("new") == b"replaced"
    with pytest.raises(UnreachableError):
        await process.rename("old", "new")
    assert await process.listing() == ["new", "old"]
    assert await process.load("new") == await process.load("old") == b"moved"
    await process.close(fh)
    await process.writer.deferred.drain()
    assert process.store.metadata("old")["mode"] == str(stat.S_IFREG | 0o600)


@pytest.mark.parametrize("is_replacing", [False, True])
@pytest.mark.parametrize("lost", [("DELETE", "old"), ("COPY", "new")])
async def test_a_file_whose_copy_or_delete_has_no_answer_is_renamed(
    process: Process, lost: tuple[str, str], *, is_replacing: bool
) -> None:
    """Its copy is all that there is, or would be left under the new name."""
    process.store.put("old", b"moved")
    error = UnreachableError(lost[1])
    error.may_be_done = True
    process.store.after = failing(error, lost)
    fh = await process.create("new", b"new") if is_replacing else None
    await process.rename("old", "new")
    assert await process.listing() == ["new"]
    assert await process.load("new") == b"moved"
    if fh is not None:
        await process.close(fh)
    assert process.store.contents() == {"new": b"moved"}


async def test_a_copy_stays_while_its_old_object_may_be_deleted_late(mount: MortalMount) -> None:
    """By the request that got no answer."""
    late = mount.store.unanswered = UncertainKeys(mount.directory / "late", "test", (3600.0,))
    mount.store.put("old", b"moved")

    def fail(what: str, key: str) -> None:
        if (what, key) == ("DELETE", "old"):
            late.note_unanswered(Change(DELETE, "old"))
            raise UnreachableError(key)

    mount.store.before = fail
    async with mount.serving() as process:
        with pytest.raises(UnreachableError):
            await process.rename("old", "new")
        del mount.store.objects["old"]
        assert await process.load("new") == b"moved"
    late.close(remove=False)
    assert mount.store.contents() == {"new": b"moved"}


async def test_a_rename_that_fails_leaves_no_copy_under_a_file_that_is_not_uploaded(
    process: Process,
) -> None:
    """Else it would be there once that file was removed."""
    process.store.put("old", b"moved")
    process.store.before = failing(UnreachableError("old"), ("DELETE", "old"))
    await process.mkdir("other")  # a file that was there before would count as inherited
    fh = await process.create("new", b"new")
    with pytest.raises(UnreachableError):
        await process.rename("old", "new")
    await process.unlink("new")
    await process.close(fh)
    assert process.store.contents() == {"old": b"moved"}


@pytest.mark.parametrize("deleted", ["old", "old/"])
async def test_a_name_whose_object_is_just_deleted_does_not_show_the_defaults(
    mount: MortalMount, deleted: str
) -> None:
    """It would keep them under its new name; the next process does not know any attributes."""
    mount.store.put(deleted, uid="7")
    async with mount.serving() as process:
        nodeid = (await process.node("old")).nodeid
    async with mount.serving() as process:
        stop, inodes = Stop(mount.store, "DELETE", deleted), process.operations.inodes
        names = (inodes.root, "old"), (inodes.root, "new")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.changes.rename, *names, 0, process.caller())
            await stop.reached.wait()
            del mount.store.objects[deleted]
            with pytest.raises(FileNotFoundError) if deleted == "old" else nullcontext():
                await process.stat(inodes.get(nodeid))
            stop.go_on.set()
        assert (await process.stat(await process.node("new"))).uid == 7


async def test_a_name_that_is_renamed_while_it_is_looked_up_is_gone(process: Process) -> None:
    process.store.put("old", b"x")
    stop = Stop(process.store, "HEAD", "old")

    async def rename() -> None:
        await stop.reached.wait()
        root = process.operations.inodes.root
        await process.changes.rename((root, "old"), (root, "new"), 0, process.caller())
        stop.go_on.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rename)
        with pytest.raises(FileNotFoundError):
            await process.node("old")


async def test_what_is_read_past_the_cache_while_it_is_renamed_is_read_under_its_new_name(
    process: Process,
) -> None:
    content = bytes(range(256)) * (16 << 10)
    process.store.put("old", content)
    fh = await process.open("old")
    file = process.operations.handles.files[fh].file
    process.operations.cache.disable(file, OSError(errno.EIO, "the disk fails"))

    async def rename_first() -> None:
        if process.store.requests[-1] == ("GET", "old"):
            process.store.pause = trio.lowlevel.checkpoint
            await process.rename("old", "new")

    process.store.pause = rename_first
    assert await process.read(fh, 2 << 20, 1000) == content[2 << 20 :][:1000]
    assert await process.listing() == ["new"]
