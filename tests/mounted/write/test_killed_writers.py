"""A program that is killed while it rewrites an object: what it did not close replaces nothing."""

import functools
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from fusefs.posix.types import NewAttributes
from fusefs.posix.write import flush as flushing
from tests.support.memory_store import failing
from tests.support.mounting import WRITABLE, Mount, Mounter, metadata, status, uploads
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, stored
from tests.support.sharing import PATIENCE_S, content, python
from tests.support.survival.mortal_mount import DiedError, MortalMount, Process, answered
from tests.support.waiting import until

MIB = 1 << 20
OLD = b"the old content" * 1000
NEW = b"n" * 1000
REWRITE = os.O_WRONLY | os.O_TRUNC

# Writes to a file, says that it has, and ends when and as it is ordered: by itself or a signal.
WRITER = """
import os, signal, sys
path, flags, count, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
signal.signal(signal.SIGINT, signal.SIG_DFL)
fd = os.open(path, flags, 0o644)
for _ in range(count):
    os.write(fd, b"n" * 1000)
if end == "synced":
    os.fsync(fd)
    os.write(fd, b"more")
if end == "forked" and os.fork() == 0:
    os.read(0, 1)
    os.write(fd, b"child")
    os.close(fd)
    os._exit(0)
print("written", flush=True)
if end == "forked":
    signal.pause()
os.read(0, 1)
if end == "close":
    os.close(fd)
os._exit(3)
"""


@pytest.fixture(scope="module")
def mounts(module_mounter: Mounter) -> Callable[[str], Mount]:
    """One mount for each durability."""

    @functools.cache
    def mounted(durability: str) -> Mount:
        options = (WRITABLE, "--durability", durability, "--metadata-ttl", "0s")
        return module_mounter(*options, cache=durability)

    return mounted


@pytest.fixture
def mount(request: pytest.FixtureRequest, mounts: Callable[[str], Mount]) -> Mount:
    return mounts(getattr(request, "param", "bucket"))


each_durability = pytest.mark.parametrize("mount", ["bucket", "local"], indirect=True)


def writing(
    path: Path, flags: int = REWRITE, count: int = 1, end: str = "exit"
) -> subprocess.Popen[str]:
    """A program that has written NEW so many times, and has not closed the file."""
    program = python(WRITER, path, flags, count, end)
    assert program.stdout.readline() == "written\n"
    return program


def kill(program: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    program.send_signal(number)
    program.communicate(timeout=PATIENCE_S)
    assert program.returncode == -number


def settle(mount: Mount) -> None:
    until(lambda: status(mount)["writing"]["staged"] == 0, "nothing is staged any more")


@each_durability
@states(
    "A program that a signal ends before it has closed a file that it rewrites leaves the object"
    " as it was; what it wrote to a new file is kept as far as it came."
)
@pytest.mark.parametrize(
    ("count", "number"),
    [(1, signal.SIGKILL), (1, signal.SIGTERM), (1, signal.SIGSEGV), (40_000, signal.SIGINT)],
)
def test_the_old_object_stays(
    mount: Mount, shared: Bucket, count: int, number: signal.Signals
) -> None:
    shared.put("old", OLD)
    kill(writing(mount.path / "old", count=count), number)
    settle(mount)
    assert stored(shared, "old") == OLD
    assert (mount.path / "old").read_bytes() == OLD
    assert uploads(shared) == []
    assert "old stays as it was" in mount.log.read_text()


@each_durability
def test_attributes_that_were_set_just_before_stay(mount: Mount, shared: Bucket) -> None:
    path = mount.path / "described"
    path.write_bytes(OLD)
    settle(mount)
    os.chmod(path, 0o640)
    os.utime(path, (0, 1_000_000_000))
    kill(writing(path))
    settle(mount)
    until(lambda: path.stat().st_size == len(OLD), "the old content is back")
    assert (path.stat().st_mode & 0o777, path.stat().st_mtime) == (0o640, 1_000_000_000)
    mode = str(0o100640)
    until(lambda: metadata(shared, "described").get("mode") == mode, "the bucket has it")
    assert stored(shared, "described") == OLD


def test_the_old_object_stays_where_a_part_of_it_was_written(mount: Mount, shared: Bucket) -> None:
    old = content("edited", 20 * MIB)
    shared.put("edited", old)
    kill(writing(mount.path / "edited", os.O_RDWR))
    settle(mount)
    assert stored(shared, "edited") == old
    assert (mount.path / "edited").read_bytes() == old
    # And it can be written to as before.
    with open(mount.path / "edited", "r+b") as file:
        file.write(NEW)
    settle(mount)
    assert stored(shared, "edited") == NEW + old[len(NEW) :]


@pytest.mark.parametrize("end", ["exit", "close"])
def test_a_program_that_ends_by_itself_has_replaced_it(
    mount: Mount, shared: Bucket, end: str
) -> None:
    shared.put("old", OLD)
    writing(mount.path / "old", end=end).communicate("\n", timeout=PATIENCE_S)
    settle(mount)
    assert stored(shared, "old") == NEW
    assert (mount.path / "old").read_bytes() == NEW


@each_durability
def test_what_was_written_to_a_new_file_is_kept(mount: Mount, shared: Bucket) -> None:
    kill(writing(mount.path / "new", os.O_WRONLY | os.O_CREAT))
    settle(mount)
    assert stored(shared, "new") == NEW
    (mount.path / "new").unlink()


@each_durability
def test_what_was_synced_is_not_taken_back(mount: Mount, shared: Bucket) -> None:
    shared.put("old", OLD)
    kill(writing(mount.path / "old", end="synced"))
    settle(mount)
    assert stored(shared, "old") in (NEW, NEW + b"more")


@each_durability
@states("What it has appended is kept as well.")
def test_what_was_appended_stays(mount: Mount, shared: Bucket) -> None:
    shared.put("old", OLD)
    kill(writing(mount.path / "old", os.O_WRONLY | os.O_APPEND), signal.SIGTERM)
    settle(mount)
    assert stored(shared, "old") == OLD + NEW


def test_who_has_it_open_as_well_and_closes_it_decides(mount: Mount, shared: Bucket) -> None:
    shared.put("old", OLD)
    with open(mount.path / "old", "r+b", buffering=0) as other:
        other.write(b"mine")
        kill(writing(mount.path / "old", os.O_RDWR))
    settle(mount)
    assert stored(shared, "old") == NEW + OLD[len(NEW) :]


def test_a_child_that_goes_on_with_the_file_decides(mount: Mount, shared: Bucket) -> None:
    shared.put("old", OLD)
    program = writing(mount.path / "old", end="forked")
    program.send_signal(signal.SIGKILL)
    assert program.wait(PATIENCE_S) == -signal.SIGKILL
    program.communicate("\n", timeout=PATIENCE_S)
    settle(mount)
    assert stored(shared, "old") == NEW + b"child"


async def flush(process: Process, fh: int, *, was_killed: bool) -> None:
    """A close by a program that was killed, or was not."""

    async def look(_pid: int) -> bool:
        return was_killed

    process.operations.notifier.was_killed = look
    await answered(process.writer.flusher.flush(fh, 7))


async def test_no_other_close_costs_a_look_at_the_process(tmp_path: Path) -> None:
    mount, looks = MortalMount(tmp_path / "mount"), []
    mount.store.put("old", OLD)
    async with mount.serving() as process:

        async def look(pid: int) -> bool:
            looks.append(pid)
            return False

        process.operations.notifier.was_killed = look

        async def close(fh: int) -> None:
            await answered(process.writer.flusher.flush(fh, 7))
            await answered(process.operations.release(fh))

        await close(await process.create("new", NEW))
        await close(await process.open("old"))
        await close(await process.open("old", os.O_RDWR))
        assert looks == []
        fh = await process.open("old", os.O_RDWR)
        await process.write(fh, 0, NEW)
        await close(fh)
        assert looks == [7]
    assert mount.store.contents() == {"new": NEW, "old": NEW + OLD[len(NEW) :]}


@pytest.mark.parametrize("is_released", [True, False])
async def test_the_old_object_stays_where_the_daemon_dies_as_well(
    tmp_path: Path, *, is_released: bool
) -> None:
    mount = MortalMount(tmp_path / "mount")
    mount.store.put("old", OLD)
    async with mount.serving() as process:
        fh = await process.open("old", REWRITE)
        await process.write(fh, 0, NEW)
        await flush(process, fh, was_killed=True)
        if is_released:
            process.operations.release(fh)
    async with mount.serving() as process:
        if not is_released:
            process.operations.release(fh)
        await trio.testing.wait_all_tasks_blocked()
        assert list(process.writer.staging) == []
        assert await process.load("old") == OLD
    assert mount.store.contents() == {"old": OLD}


async def test_nothing_is_undone_below_a_directory_that_is_just_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushing, "UNDO_S", 0.0)
    mount = MortalMount(tmp_path / "mount")
    mount.store.put("a/old", OLD)
    async with mount.serving() as process:
        fh, lock = await process.open("a/old", REWRITE), process.changes.prefix_lock
        await process.write(fh, 0, NEW)
        await flush(process, fh, was_killed=True)
        (staged,) = process.writer.staging
        async with staged.lock:
            process.operations.release(fh)
            await trio.testing.wait_all_tasks_blocked()
            closure = lock.close("a/", "b/")
        await trio.testing.wait_all_tasks_blocked()
        assert list(process.writer.staging) == [staged]
        lock.open(closure)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert list(process.writer.staging) == []


async def test_a_program_that_closes_it_after_the_killed_one_decides_under_the_next_daemon(
    tmp_path: Path,
) -> None:
    mount = MortalMount(tmp_path / "mount")
    mount.store.put("old", OLD)

    async with mount.killed() as process:
        mount.store.before = failing(DiedError, "PUT")
        handles = [await process.open("old", os.O_RDWR) for _ in range(2)]
        await process.write(handles[0], 0, NEW)
        await flush(process, handles[0], was_killed=True)
        await flush(process, handles[1], was_killed=False)
    mount.store.heal()
    async with mount.serving() as process:
        for fh in handles:
            process.operations.release(fh)
        await trio.testing.wait_all_tasks_blocked()
    assert mount.store.contents() == {"old": NEW + OLD[len(NEW) :]}


async def test_modes_that_change_at_once_do_not_bring_back_what_a_killed_program_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushing, "LATER_S", 0.0)
    mount = MortalMount(tmp_path / "mount")
    mount.store.put("old", OLD)
    async with mount.serving() as process:
        fh = await process.open("old", os.O_RDWR)
        inode = await process.node("old")
        await process.write(fh, 0, NEW)
        await flush(process, fh, was_killed=True)
        assert process.operations.release(fh) is None
        process.writer.flusher.described(inode)  # before anything else runs
        await trio.sleep(0.5)
        await process.operations.mutations.setattr(inode.nodeid, NewAttributes(mode=0o600))
    assert mount.store.contents() == {"old": OLD}
