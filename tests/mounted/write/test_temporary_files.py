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
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import content, mounted
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
def mount(
    s3: S3Server, shared: Bucket, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mount]:
    for key in ("old/other", "there/file"):
        shared.put(key, b"before")
    directory = tmp_path_factory.mktemp("temporary")
    options = (*OPTIONS, "--metadata-ttl", "indefinite")
    with mounted(s3, f"s3://{shared.name}", directory, *options) as mount:
        (mount.path / "new").mkdir()
        yield mount


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


def test_with_bucket_durability_a_temporary_file_is_in_the_bucket_at_its_close(
    mounter: Mounter, bucket: Bucket
) -> None:
    mount = mounter(*OPTIONS, "--durability", "bucket")
    make(mount.path / "file.tmp", b"content")
    assert stored(bucket, "file.tmp") == b"content"


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
    " is there."
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
    mounter: Mounter, bucket: Bucket, faulty: FaultyS3
) -> None:
    bucket.put("index", b"old")
    mount = mounter(*OPTIONS, endpoint_url=faulty.endpoint_url)
    with open(mount.path / "index.lock", "xb", buffering=0) as file:
        file.write(b"new")
        os.rename(mount.path / "index.lock", mount.path / "index")
        assert stored(bucket, "index") == b"new"
    assert not [one for one in faulty.requests("COPY") if one.key == "index"]


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
    mounter: Mounter, bucket: Bucket, faulty: FaultyS3
) -> None:
    bucket.put("model", b"old")
    mount = mounter(*OPTIONS, endpoint_url=faulty.endpoint_url)
    make(mount.path / "model.tmp", b"weights")
    rule = faulty.add("PUT", "model", code="AccessDenied")
    with pytest.raises(PermissionError):
        os.rename(mount.path / "model.tmp", mount.path / "model")
    assert (mount.path / "model").read_bytes() == stored(bucket, "model") == b"old"
    assert (mount.path / "model.tmp").read_bytes() == b"weights"
    faulty.remove(rule)
    os.rename(mount.path / "model.tmp", mount.path / "model")
    assert (mount.path / "model").read_bytes() == stored(bucket, "model") == b"weights"
    all_sent(mount)
    assert keys(bucket) == ["model"]


@refused
def test_a_directory_that_the_bucket_refuses_is_renamed_and_its_files_are_tried_again(
    mounter: Mounter, bucket: Bucket, faulty: FaultyS3
) -> None:
    mount = mounter(*OPTIONS, endpoint_url=faulty.endpoint_url)
    (mount.path / ".tmpQw4rTy").mkdir()
    make(mount.path / ".tmpQw4rTy/file", b"content")
    rule = faulty.add("PUT", "package/file", code="AccessDenied")
    with pytest.raises(PermissionError):
        os.rename(mount.path / ".tmpQw4rTy", mount.path / "package")
    faulty.remove(rule)
    assert (mount.path / "package/file").read_bytes() == b"content"
    all_sent(mount)
    assert stored(bucket, "package/file") == b"content"


@pytest.mark.parametrize("dies_in", ["close", "rename"])
@pytest.mark.parametrize("name", [".tmpAb3xYz", "file.lock"])
def test_a_temporary_file_outlives_the_daemon(
    mounter: Mounter, bucket: Bucket, faulty: FaultyS3, dies_in: str, name: str
) -> None:
    bucket.put("file", b"old")
    mount = mounter(*OPTIONS, endpoint_url=faulty.endpoint_url)
    make(mount.path / name, b"content")
    if dies_in == "close":
        kill_serving(mount)
        os.rename(mount.path / name, mount.path / "file")
    else:
        rule = faulty.add("PUT", "file", stall=True, times=1)
        with ThreadPoolExecutor(1) as pool:
            renamed = pool.submit(os.rename, mount.path / name, mount.path / "file")
            until(lambda: rule.used == 1, "the rename sends the file")
            kill_serving(mount)
            renamed.result()
    assert (mount.path / "file").read_bytes() == stored(bucket, "file") == b"content"
    assert pending(mount) == []
    assert keys(bucket) == ["file"]
