"""Temporary files: closed on the local disk, sent once under their last name when renamed."""

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.mounting import WRITABLE, Mount, Mounter, all_sent, cost, pending
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import content
from tests.support.survival.surviving import kill_serving
from tests.support.waiting import until

pytestmark = pytest.mark.root

OPTIONS = ("--session", "kernel", WRITABLE)
NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY

sent_by_its_rename = states(
    "The close of a temporary file of less than 16 MiB waits for the local disk alone, unless its"
    " path has `bucket` durability, and its rename waits until the bucket has it under its last"
    " name, by one PUT; without a rename the bucket has it five seconds later, or when programs"
    " close no more files, 25 s at most. If the node is lost before that, the file is lost;"
    " `fsync` waits for the bucket."
)
refused = states(
    "If the bucket refuses the file, its rename fails and nothing is renamed; that of a directory"
    " is done and fails all the same."
)


@pytest.fixture(scope="module")
def mount(shared: Bucket, module_mounter: Mounter) -> Mount:
    for key in ("old/other", "there/file"):
        shared.put(key, b"before")
    mount = module_mounter(*OPTIONS, "--metadata-ttl", "indefinite")
    (mount.path / "new").mkdir()
    return mount


@pytest.fixture(scope="module")
def through(faulty: FaultyS3, module_mounter: Mounter) -> Mount:
    """A mount whose requests may fail."""
    options = (*OPTIONS, "--metadata-ttl", "0s")
    return module_mounter(*options, endpoint_url=faulty.endpoint_url, cache="through")


@pytest.fixture
def place(through: Mount, folder: Bucket, faulty: FaultyS3) -> Iterator[Path]:
    """The test's folder on that mount."""
    yield through.path / folder.prefix
    faulty.clear()


def make(path: Path, data: bytes, flags: int = NEW) -> None:
    fd = os.open(path, flags)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


@sent_by_its_rename
@pytest.mark.parametrize("name", [".tmpAb3xYz", "file.tmp"])
@pytest.mark.parametrize("to", ["new/file", "old/file", "there/file"])
def test_a_temporary_file_that_is_renamed_costs_one_put(
    mount: Mount, shared: Bucket, name: str, to: str
) -> None:
    path = mount.path / "new" / name

    def save() -> None:
        path.write_bytes(to.encode())
        os.rename(path, mount.path / to)

    (mount.path / to).stat() if to == "there/file" else os.listdir(mount.path / "old")
    assert cost(mount, save) == {"puts": 1}
    assert stored(shared, to) == to.encode()
    assert cost(mount, lambda: (mount.path / to).read_bytes()) == {}
    (mount.path / to).write_bytes(b"before")


@sent_by_its_rename
def test_a_temporary_file_that_is_linked_and_removed_costs_one_put(
    mount: Mount, shared: Bucket
) -> None:
    """As git makes its objects."""
    path = mount.path / "new/tmp_obj_a7Bc9d"

    def save() -> None:
        make(path, b"object")
        os.link(path, mount.path / "new/object")
        path.unlink()

    assert cost(mount, save) == {"puts": 1}
    assert stored(shared, "new/object") == b"object"


@sent_by_its_rename
def test_fsync_of_a_temporary_file_waits_for_the_bucket(mount: Mount, shared: Bucket) -> None:
    """Its object is copied then: a second PUT would take a large file as long again."""
    with open(mount.path / "new/synced.tmp", "wb") as file:
        file.write(b"synced")
        file.flush()
        os.fsync(file.fileno())
        assert stored(shared, "new/synced.tmp") == b"synced"
    rename = cost(mount, lambda: os.rename(mount.path / "new/synced.tmp", mount.path / "new/ed"))
    assert (rename.get("puts"), rename["copies"], rename["deletes"]) == (None, 1, 1)
    assert stored(shared, "new/ed") == b"synced"


@sent_by_its_rename
def test_what_is_not_renamed_is_in_the_bucket_a_moment_later(mount: Mount, shared: Bucket) -> None:
    make(mount.path / "new/stays.part", b"content")
    assert "new/stays.part" not in keys(shared)
    until(lambda: "new/stays.part" in keys(shared), "the bucket has it")
    large = content("large", 16 << 20)
    (mount.path / "new/large.tmp").write_bytes(large)
    assert stored(shared, "new/large.tmp") == large


@states(
    "What lies below a directory with a random name is temporary as well; a rename of the"
    " directory waits until the bucket has all of it."
)
def test_a_temporary_directory_that_is_renamed_copies_no_file(mount: Mount, shared: Bucket) -> None:
    directory = mount.path / "new/.tmpQw4rTy"
    directory.mkdir()

    def unpack() -> None:
        for number in range(10):
            make(directory / f"{number}.py", b"%d" % number)
        directory.rename(mount.path / "new/package")

    requests = cost(mount, unpack)
    assert requests["puts"] == 11  # with the directory's marker
    assert "copies" not in requests
    assert all(stored(shared, f"new/package/{n}.py") == b"%d" % n for n in range(10))


@states(
    "A lock that is renamed to its file, as git's are, is reserved in the bucket until the file"
    " is there.",
    "O_EXCL holds between mounts, where the store knows conditional writes: of two nodes that "
    "create one name, one gets EEXIST.",
)
def test_a_lock_between_mounts_holds_until_its_file_is_in_the_bucket(
    mounter: Mounter, bucket: Bucket
) -> None:
    bucket.put("index", b"old")
    ours, theirs = (mounter(*OPTIONS, "--metadata-ttl", "0s", cache=name) for name in "ab")
    make(ours.path / "index.lock", b"ours")
    with pytest.raises(FileExistsError):
        os.open(theirs.path / "index.lock", NEW)
    assert (stored(bucket, "index"), stored(bucket, "index.lock")) == (b"old", b"")
    requests = cost(ours, lambda: os.rename(ours.path / "index.lock", ours.path / "index"))
    assert (requests["puts"], requests.get("copies"), requests["deletes"]) == (1, None, 1)
    assert (theirs.path / "index").read_bytes() == b"ours"
    make(theirs.path / "index.lock", b"theirs")
    os.rename(theirs.path / "index.lock", theirs.path / "index")
    assert (ours.path / "index").read_bytes() == b"theirs"
    assert keys(bucket) == ["index"]


def test_a_lock_that_is_renamed_before_its_close_replaces_nothing_by_an_empty_object(
    place: Path, folder: Bucket, faulty: FaultyS3
) -> None:
    folder.put("index", b"old")
    with open(place / "index.lock", "xb", buffering=0) as file:
        file.write(b"new")
        os.rename(place / "index.lock", place / "index")
        assert stored(folder, "index") == b"new"
    assert not faulty.requests("COPY", "*/index")


def test_a_rename_that_is_to_replace_nothing_replaces_no_other_nodes_file(
    mounter: Mounter, bucket: Bucket
) -> None:
    mount = mounter(*OPTIONS)
    make(mount.path / "file.tmp", b"ours")
    assert not (mount.path / "file").exists()
    bucket.put("file", b"theirs")
    moved = subprocess.run(["mv", "--no-clobber", "file.tmp", "file"], cwd=mount.path, check=False)
    assert stored(bucket, "file") == b"theirs", moved
    assert (mount.path / "file.tmp").read_bytes() == b"ours"


@refused
def test_a_rename_that_the_bucket_refuses_renames_nothing(
    through: Mount, place: Path, folder: Bucket, faulty: FaultyS3
) -> None:
    folder.put("model", b"old")
    make(place / "model.tmp", b"weights")
    rule = faulty.add("PUT", "*/model", code="AccessDenied")
    with pytest.raises(PermissionError):
        os.rename(place / "model.tmp", place / "model")
    assert (place / "model").read_bytes() == stored(folder, "model") == b"old"
    assert (place / "model.tmp").read_bytes() == b"weights"
    faulty.remove(rule)
    os.rename(place / "model.tmp", place / "model")
    assert (place / "model").read_bytes() == stored(folder, "model") == b"weights"
    all_sent(through)
    assert keys(folder) == ["model"]


@refused
def test_a_directory_that_the_bucket_refuses_is_renamed_and_its_files_are_tried_again(
    through: Mount, place: Path, folder: Bucket, faulty: FaultyS3
) -> None:
    (place / ".tmpQw4rTy").mkdir(parents=True)
    make(place / ".tmpQw4rTy/file", b"content")
    rule = faulty.add("PUT", "*/package/file", code="AccessDenied")
    with pytest.raises(PermissionError):
        os.rename(place / ".tmpQw4rTy", place / "package")
    faulty.remove(rule)
    assert (place / "package/file").read_bytes() == b"content"
    all_sent(through)
    assert stored(folder, "package/file") == b"content"


@pytest.mark.parametrize("dies_in", ["close", "rename"])
@pytest.mark.parametrize("name", [".tmpAb3xYz", "file.lock"])
def test_a_temporary_file_outlives_the_daemon(
    through: Mount, place: Path, folder: Bucket, faulty: FaultyS3, dies_in: str, name: str
) -> None:
    folder.put("file", b"old")
    make(place / name, b"content")
    if dies_in == "close":
        kill_serving(through)
        os.rename(place / name, place / "file")
    else:
        rule = faulty.add("PUT", "*/file", stall=True, times=1)
        with ThreadPoolExecutor(1) as pool:
            renamed = pool.submit(os.rename, place / name, place / "file")
            until(lambda: rule.used == 1, "the rename sends the file")
            kill_serving(through)
            renamed.result()
    assert (place / "file").read_bytes() == stored(folder, "file") == b"content"
    assert pending(through) == []
    assert keys(folder) == ["file"]
