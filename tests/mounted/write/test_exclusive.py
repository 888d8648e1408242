"""O_EXCL: one node of two makes a file, and what copies files pays one PUT for each."""

import os
from pathlib import Path

import pytest

from fusefs.posix.write.upload_steps import CREATED_BY
from tests.support.mounting import WRITABLE, Mount, Mounter, cost, metadata
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.sharing import content
from tests.support.survival.surviving import kill_serving
from tests.support.waiting import until

pytestmark = pytest.mark.root

NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY
LARGE = content("large", 10_000)


@pytest.fixture(scope="module")
def mount(shared: Bucket, module_mounter: Mounter) -> Mount:
    shared.put("old/before", b"x")
    shared.put("renamed/to", b"before")
    return module_mounter("--session", "kernel", WRITABLE, "--metadata-ttl", "indefinite")


def make(path: Path, data: bytes) -> None:
    fd = os.open(path, NEW)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def fails_to_close(fd: int) -> bool:
    try:
        os.close(fd)
    except FileExistsError:
        return True
    return False


def staged_below(mount: Mount) -> list[Path]:
    """The contents that wait for their upload."""
    found = mount.cache.glob("mounts/*/staging/*/*")
    return [path for path in found if path.name.isdecimal()]


def test_files_in_a_directory_that_was_just_made_take_one_request_each(mount: Mount) -> None:
    (mount.path / "made").mkdir()

    def unpack() -> None:
        for number in range(10):
            make(mount.path / "made" / f"{number}", b"small")

    assert cost(mount, unpack) == {"puts": 10}


@states(
    "Creating with O_EXCL puts an empty object first, and fails by itself: where the name is one of"
    " a lock, and in directories that this mount did not make within ten minutes, until the process"
    " has written two files of 1 KiB and more there or elsewhere; not where the path has a random"
    " name."
)
def test_a_process_that_copies_reserves_its_first_two_files_alone(mount: Mount) -> None:
    assert os.listdir(mount.path / "old") == ["before"]

    def copy() -> None:
        for number in range(10):
            make(mount.path / "old" / f"{number}", LARGE)

    assert cost(mount, copy) == {"puts": 12}
    assert cost(mount, lambda: make(mount.path / "old" / "x.pid", LARGE)) == {"puts": 2}


@pytest.mark.parametrize("name", ["index.lock", "server.pid", ".file.swp", "5.manifest#1"])
def test_a_lock_is_seen_by_other_nodes_at_once(mount: Mount, shared: Bucket, name: str) -> None:
    (mount.path / "locks").mkdir(exist_ok=True)
    os.close(os.open(mount.path / "locks" / name, NEW))
    shared.put(f"locks/other-{name}", b"another node's")
    with pytest.raises(FileExistsError):
        os.open(mount.path / "locks" / f"other-{name}", NEW)
    assert stored(shared, f"locks/other-{name}") == b"another node's"


@states(
    "Otherwise the content is put alone, on the condition that there is no object: `close` and"
    " `fsync` fail with EEXIST if there is, and the content is kept as NAME.conflict-HOST-TIME."
)
@pytest.mark.parametrize("data", [b"", b"ours", content("parts", 20_000_000)])
def test_the_second_of_two_nodes_is_refused_when_it_closes(
    mount: Mount, shared: Bucket, data: bytes
) -> None:
    directory = f"raced-{len(data)}"
    (mount.path / directory).mkdir()
    path = mount.path / directory / "file"
    fd = os.open(path, NEW)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    shared.put(f"{directory}/file", b"theirs")
    assert fails_to_close(fd)
    assert stored(shared, f"{directory}/file") == b"theirs"
    (apart,) = (key for key in keys(shared) if key.startswith(f"{directory}/file.conflict-"))
    assert stored(shared, apart) == data
    until(lambda: path.read_bytes() == b"theirs", "the mount shows the other node's file")
    # Who was refused late is refused at once from then on.
    with pytest.raises(FileExistsError):
        os.open(path, NEW)


@states(
    "A file created with O_EXCL that stays open for a second, with 4 KiB or less, is put as an"
    " empty object then, so that other nodes see it."
)
def test_what_is_held_open_as_a_lock_is_seen_by_other_nodes(mount: Mount, shared: Bucket) -> None:
    (mount.path / "held").mkdir()
    fd = os.open(mount.path / "held" / "running", NEW)
    os.write(fd, b"host 17")
    until(lambda: "held/running" in keys(shared), "the bucket has it")
    assert stored(shared, "held/running") == b""
    os.close(fd)
    assert stored(shared, "held/running") == b"host 17"
    assert CREATED_BY not in metadata(shared, "held/running")


def test_what_is_written_at_length_is_not_reserved(mount: Mount, shared: Bucket) -> None:
    (mount.path / "long").mkdir()
    (mount.path / "short").mkdir()
    fd = os.open(mount.path / "long" / "file", NEW)
    os.write(fd, LARGE)
    other = os.open(mount.path / "short" / "file", NEW)
    until(lambda: "short/file" in keys(shared), "the one that was opened later is reserved")
    assert "long/file" not in keys(shared)
    os.close(fd)
    os.close(other)
    assert stored(shared, "long/file") == LARGE


def test_a_file_that_is_renamed_before_it_is_closed_replaces_what_is_there(
    mount: Mount, shared: Bucket
) -> None:
    assert os.listdir(mount.path / "renamed") == ["to"]
    (mount.path / "renaming").mkdir()
    with open(mount.path / "renaming" / "file", "xb") as file:
        file.write(LARGE)
        file.flush()
        os.rename(mount.path / "renaming" / "file", mount.path / "renamed" / "to")
    assert stored(shared, "renamed/to") == LARGE


def test_a_new_file_is_still_new_after_the_daemon_was_killed(mount: Mount, shared: Bucket) -> None:
    (mount.path / "killed").mkdir()
    fd = os.open(mount.path / "killed" / "ours", NEW)
    os.write(fd, LARGE)
    late = os.open(mount.path / "killed" / "theirs", NEW)
    os.write(late, LARGE)
    kill_serving(mount)
    shared.put("killed/theirs", b"theirs")
    os.close(fd)
    assert fails_to_close(late)
    assert stored(shared, "killed/ours") == LARGE
    assert stored(shared, "killed/theirs") == b"theirs"


def test_a_reservation_whose_answer_was_lost_is_known_as_ones_own(
    mount: Mount, shared: Bucket
) -> None:
    (mount.path / "known").mkdir()
    before = set(staged_below(mount))
    fd = os.open(mount.path / "known" / "file", NEW)
    os.write(fd, LARGE)
    (path,) = set(staged_below(mount)) - before
    shared.client.put_object(
        Bucket=shared.name,
        Key="known/file",
        Body=b"",
        Metadata={CREATED_BY: f"{path.parent.name}-{path.name}"},
    )
    os.close(fd)
    assert stored(shared, "known/file") == LARGE
    assert os.listdir(mount.path / "known") == ["file"]


def test_an_unlinked_new_file_costs_nothing(mount: Mount) -> None:
    (mount.path / "gone").mkdir()

    def come_and_go() -> None:
        fd = os.open(mount.path / "gone" / "file", NEW)
        os.unlink(mount.path / "gone" / "file")
        os.close(fd)

    assert cost(mount, come_and_go) == {}
